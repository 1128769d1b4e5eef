//! `outlast doctor` with real servers, good and bad, and with leftovers of other processes.

use std::{
    fs,
    io::Read,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};

use crate::{
    control::World,
    support::{OUTLAST, PUPPET},
};

/// The output of `doctor --json`, and the exit code.
fn visit(world: &World, args: &[&str]) -> (Value, i32) {
    let output = world.outlast(&[&["doctor", "--json"], args].concat());
    let told = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (told, output.status.code().unwrap())
}

/// The only finding about a subject.
fn finding<'a>(told: &'a Value, area: &str, subject: &str) -> &'a Value {
    let findings = told["findings"].as_array().unwrap();
    let found = findings.iter().find(|finding| finding["area"] == area && finding["subject"] == subject);
    found.unwrap_or_else(|| panic!("nothing about {area} {subject} in {told:#}"))
}

fn says(told: &Value, area: &str, subject: &str) -> (String, String) {
    let finding = finding(told, area, subject);
    (finding["level"].as_str().unwrap().to_owned(), finding["says"].as_str().unwrap().to_owned())
}

fn put(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

#[test]
fn servers_are_tested_and_classified() {
    let world = World::new();
    let trace = world.project.path().join("trace");
    let script = format!("echo $$ >> {0}; sleep 300 & echo $! >> {0}; echo waits >&2; sleep 300", trace.display());
    let servers = json!({"mcpServers": {
        "good": {"command": PUPPET, "env": {"HELLO": "${HOME}"}},
        "modern": {"command": PUPPET, "args": ["--era", "modern"]},
        "bad": {"command": "sh", "args": ["-c", "echo 'no token' >&2; exit 3"]},
        "missing": {"command": "no-such-program"},
        "web": {"url": "https://example.com/mcp"},
        "hangs": {"command": "sh", "args": ["-c", script]},
        "noisy": {"command": "sh", "args": ["-c", format!("echo hello; exec {PUPPET}")]},
        "unset": {"command": "x", "args": ["${OUTLAST_NO_SUCH}"]},
        "gone": {"command": "/old/outlast", "args": ["mcp", "--", "y"]},
    }});
    put(&world.project.path().join(".mcp.json"), &servers.to_string());
    assert!(world.outlast(&["trust", ".mcp.json"]).status.success());
    put(&world.home.path().join(".cursor/mcp.json"), "{");
    let (told, code) = visit(&world, &["--timeout", "3"]);
    assert_eq!(code, 1);

    let (level, words) = says(&told, "server", "good");
    assert_eq!(level, "remark", "it is not wrapped");
    assert!(words.starts_with("not wrapped; answers in ") && words.contains("puppet"), "{words}");
    assert!(says(&told, "server", "modern").1.contains("2026-07-28"), "{told:#}");
    let bad = finding(&told, "server", "bad");
    assert_eq!((&bad["level"], &bad["details"]), (&json!("problem"), &json!([])), "the line is quoted once");
    assert!(bad["says"].as_str().unwrap().ends_with("exit code 3 before it answered: no token"), "{bad}");
    assert!(bad["mend"].as_str().unwrap().contains("sh -c"), "{bad}");
    assert!(says(&told, "server", "missing").1.contains("no program named `no-such-program`"));
    assert_eq!(says(&told, "server", "web"), ("untested".into(), "reached over the network; not tested".into()));
    let hangs = finding(&told, "server", "hangs");
    assert_eq!(hangs["level"], "problem");
    assert!(hangs["says"].as_str().unwrap().contains("did not answer within 3 s: waits"), "{hangs}");
    assert!(finding(&told, "server", "noisy")["details"][0].as_str().unwrap().contains("1 line"));
    assert!(says(&told, "server", "unset").1.contains("not tested: `OUTLAST_NO_SUCH` is not set here"));
    let gone = finding(&told, "server", "gone");
    assert_eq!((&gone["level"], &gone["mend"]), (&json!("problem"), &json!("outlast wrap --client claude-code")));
    let cursor = told["findings"].as_array().unwrap().iter().filter(|finding| finding["subject"] == "Cursor");
    assert!(cursor.into_iter().any(|finding| finding["level"] == "problem"), "{told:#}");

    for pid in fs::read_to_string(trace).unwrap().lines() {
        assert!(!Path::new("/proc").join(pid).exists(), "{pid} is left");
    }
}

/// On a terminal the progress line is rewritten in place; it names the servers that it waits for.
#[test]
fn progress_is_shown_while_a_server_starts() {
    let world = World::new();
    let servers = json!({"mcpServers": {"sleepy": {"command": "sh", "args": ["-c", "sleep 300"]}}});
    put(&world.project.path().join(".mcp.json"), &servers.to_string());
    assert!(world.outlast(&["trust", ".mcp.json"]).status.success());
    let terminal = nix::pty::openpty(None, None).unwrap();
    let mut doctor = world.command(world.project.path());
    doctor.args(["doctor", "--timeout", "600"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(terminal.slave);
    let mut child = doctor.spawn().unwrap();
    drop(doctor);
    let (mut seen, mut piece) = (String::new(), [0; 1024]);
    let mut screen = fs::File::from(terminal.master);
    // Long before the timeout of the server.
    while !seen.contains("Testing servers: 0 of 1 done, waiting for sleepy (") {
        let count = screen.read(&mut piece).unwrap();
        seen.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
    assert!(seen.starts_with("\r\x1b[2KChecking outlast"), "{seen:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    // Without a terminal it is one plain line.
    let output = world.outlast(&["doctor", "--no-start"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "Checking outlast, your clients and their servers…\n");
    assert!(world.outlast(&["doctor", "--no-start", "--json"]).stderr.is_empty());
}

#[test]
fn a_wrapped_server_is_tested_without_outlast() {
    let world = World::new();
    let servers = json!({"mcpServers": {"good": {"command": OUTLAST, "args": ["mcp", "--", PUPPET]}}});
    // The program under test has another name, so it is called by a link.
    let link = world.home.path().join("bin/outlast");
    fs::create_dir(link.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(OUTLAST, &link).unwrap();
    let file = servers.to_string().replace(OUTLAST, link.to_str().unwrap());
    put(&world.home.path().join(".cursor/mcp.json"), &file);
    let (told, _) = visit(&world, &[]);
    let (level, words) = says(&told, "server", "good");
    assert_eq!(level, "fine");
    assert!(words.starts_with("wrapped; answers in "), "{words}");
    assert!(world.ps().is_empty() && !world.project.path().join(".outlast").exists(), "nothing was started but it");

    let (told, _) = visit(&world, &["--no-start"]);
    assert_eq!(says(&told, "server", "good"), ("untested".into(), "wrapped; not tested".into()));
}

#[test]
fn the_state_directory_is_checked() {
    let world = World::new();
    let (told, _) = visit(&world, &[]);
    assert!(says(&told, "state", "directory").1.ends_with("does not exist yet"));
    assert_eq!(says(&told, "instance", "instances").1, "nothing runs under outlast");

    let _weather = world.start("weather", &[]);
    assert_eq!(says(&visit(&world, &[]).0, "instance", "instances").1, "1 instance, without problems");

    put(&world.run_dir().join("ghost.sock"), "");
    put(&world.run_dir().join("torn.json"), "{");
    fs::set_permissions(world.run_dir(), fs::Permissions::from_mode(0o755)).unwrap();
    let (told, _) = visit(&world, &[]);
    let run = world.run_dir().display().to_string();
    assert_eq!(finding(&told, "state", "permissions")["mend"], format!("chmod 700 {run}"));
    let mends: Vec<&str> = told["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|finding| finding["subject"] == "leftover")
        .map(|finding| finding["mend"].as_str().unwrap())
        .collect();
    assert_eq!(mends, [format!("rm {run}/ghost.sock"), format!("rm {run}/torn.json")]);
}

#[test]
fn a_server_that_was_given_up_is_a_problem() {
    let world = World::new();
    // It crashes at each start, and is given up after one more.
    let mut broken = world
        .command(world.project.path())
        .args(["mcp", "--name", "broken", "--policy", "exponential", "--max-restarts", "1"])
        .args(["--", "sh", "-c", "echo boom >&2; exit 3"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while world.ps().first().is_none_or(|row| row["state"] != "given_up") {
        assert!(std::time::Instant::now() < deadline, "{:?}", world.ps());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let id = world.ps()[0]["id"].as_str().unwrap().to_owned();
    let (told, code) = visit(&world, &[]);
    let found = finding(&told, "instance", &id);
    assert_eq!((&found["level"], &found["mend"]), (&json!("problem"), &json!(format!("outlast resume {id}"))));
    assert_eq!(found["details"], json!(["boom"]));
    assert_eq!(code, 1);
    drop(broken.stdin.take());
    broken.wait().unwrap();
}

/// Kills a process with the test, even if the test fails.
struct Stray(Child);

impl Drop for Stray {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_orphan_is_found_and_a_child_of_a_running_outlast_is_none() {
    let world = World::new();
    let mut weather = world.start("weather", &[]);
    let child = weather.pid().to_string();
    let stray =
        Command::new("sleep").arg("300").env("OUTLAST_CHILD", "ghost-1abcd.2").process_group(0).spawn().unwrap();
    let stray = Stray(stray);
    let (told, code) = visit(&world, &["--no-start"]);
    let pid = stray.0.id().to_string();
    let found = finding(&told, "orphan", &pid);
    assert_eq!(found["says"], "left by `ghost-1abcd`, whose outlast has ended: sleep 300");
    assert_eq!((&found["level"], &found["mend"]), (&json!("problem"), &json!(format!("kill {pid}"))));
    assert_eq!(code, 1);
    let findings = told["findings"].as_array().unwrap();
    assert!(findings.iter().all(|finding| finding["subject"].as_str() != Some(child.as_str())), "{told:#}");
}

#[test]
fn the_path_variable_is_checked() {
    let world = World::new();
    let bin = world.home.path().join("bin");
    fs::create_dir(&bin).unwrap();
    let other = bin.join("outlast");
    let with_path = || {
        let output = world
            .command(world.project.path())
            .args(["doctor", "--json", "--no-start"])
            .env("PATH", format!("{}:/usr/bin:/bin", bin.display()))
            .output()
            .unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    assert_eq!(says(&with_path(), "program", "PATH").0, "remark", "it is not there");
    std::os::unix::fs::symlink(OUTLAST, &other).unwrap();
    assert_eq!(says(&with_path(), "program", "PATH"), ("fine".into(), "finds this outlast".into()));
    fs::remove_file(&other).unwrap();
    put(&other, "#!/bin/sh\necho outlast 0.0.1\n");
    fs::set_permissions(&other, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(
        says(&with_path(), "program", "PATH"),
        ("problem".into(), "finds another outlast first, 0.0.1: ~/bin/outlast".into())
    );
}

#[test]
fn the_output_of_doctor_is_stable() {
    let world = World::new();
    put(&world.project.path().join(".mcp.json"), r#"{"mcpServers": {"bad": {"command": "no-such-program"}}}"#);
    assert!(world.outlast(&["trust", ".mcp.json"]).status.success());
    let output = world.outlast(&["doctor"]);
    let words = String::from_utf8(output.stdout).unwrap();
    let servers: String = words
        .split_inclusive('\n')
        .skip_while(|line| *line != "Clients\n")
        .take_while(|line| *line != "Orphans\n")
        .collect();
    insta::assert_snapshot!("doctor", servers.replace(world.project.path().to_str().unwrap(), "/PROJECT"));
}
