//! Runs the commands of the book and of the README one after the other, in a world with everything they name: a
//! gateway `tools` with a backend `github`, a server `weather`, an agent `night`, and scripts in place of claude,
//! codex and python.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    process::{Child, Command, Stdio},
};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{
    docs::commands,
    gateway::world::backend,
    mcp::client::{Client, PUPPET, Place, Setup, pids, signal, until},
    support::{COMPOSER, OUTLAST},
};

/// In place of the addresses of the book. No program listens there.
const LOCAL: &str = "https://127.0.0.1:9";

struct Reader {
    place: Place,
    tools: Option<Client>,
    weather: Option<Client>,
}

impl Reader {
    fn new() -> Reader {
        let place = Place::new();
        for dir in ["bin", "project/src", "elsewhere"] {
            fs::create_dir_all(place.path().join(dir)).unwrap();
        }
        for (name, program) in [("outlast", OUTLAST), ("claude", COMPOSER), ("codex", COMPOSER)] {
            symlink(program, place.path().join("bin").join(name)).unwrap();
        }
        place.script("bin/python", &format!("#!/bin/sh\nexec {PUPPET}\n"));
        place.write("project/plan.md", "# A plan\n");
        place.write(
            "project/.mcp.json",
            r#"{"mcpServers": {"weather": {"command": "python", "args": ["-m", "weather_server"]}, "git": {"command": "python"}}}"#,
        );
        let issues = place.write("issues.json", r#"[{"name": "create_issue", "inputSchema": {"type": "object"}}]"#);
        place.write("project/outlast.toml", &backend("github", &["--tools", &issues], ""));
        Reader { place, tools: None, weather: None }
    }

    fn command(&self, words: &[String]) -> Command {
        let home = self.place.path();
        let mut command = Command::new(OUTLAST);
        let words = words.iter().skip(1).map(|word| word.replace("~/", &format!("{}/", home.display())));
        // The port of the book may be in use, and nothing is sent to other machines.
        let local = |word: String| word.replace("https://example.com", LOCAL).replace("https://ntfy.sh", LOCAL);
        command.args(words.map(|word| local(word.replace(":7332", ":0"))));
        command.current_dir(home.join("project")).env_clear().env("HOME", home);
        command.env("PATH", format!("{}:/usr/bin:/bin", home.join("bin").display()));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs it until it exits: its exit code, and its output.
    fn run(&self, line: &str) -> (Option<i32>, String) {
        let output = self.command(&words_of(line)).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&said).into_owned())
    }

    fn rows(&self) -> Vec<Value> {
        let output = self.command(&words_of("outlast ps --json")).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn is_there(&self, name: &str) -> bool {
        let there = |row: &Value| (row["name"] == name || row["id"] == name) && row["state"] == "ready";
        self.rows().iter().any(there)
    }

    /// Starts everything that the book names and that the last command ended.
    fn have_all(&mut self) {
        self.run("outlast trust");
        if !self.is_there("github") {
            if let Some(tools) = self.tools.take() {
                signal(tools.pid(), Signal::SIGTERM);
            }
            let options = ["--listen", "127.0.0.1:0", "--name", "tools"];
            let setup = Setup::gateway(&self.place).home(self.place.path()).cwd(&self.place.path().join("project"));
            let tools = setup.options(options).hasty().start();
            tools.says("listening on http://");
            self.tools = Some(tools);
            until("the backend", || self.is_there("github").then_some(()));
        }
        if !self.is_there("weather") {
            self.weather = None;
            let elsewhere = self.place.path().join("elsewhere");
            let setup = Setup::new(&self.place).home(self.place.path()).cwd(&elsewhere);
            self.weather = Some(setup.options(["--name", "weather"]).hasty().ready());
        }
        if !self.is_there("night") {
            let begun = self.run("outlast run -d --session night --cwd ~/elsewhere -- claude");
            assert_eq!(begun, (Some(0), "night\n".to_owned()));
            until("the agent", || self.is_there("night").then_some(()));
        }
    }

    /// For a command that runs until it is stopped: checks that it starts, and that it exits when it is stopped.
    fn begins(&self, line: &str, is_begun: impl Fn(&Reader) -> bool) {
        let mut command = self.command(&words_of(line));
        // A gateway without an address to listen on ends with its stdin.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = Ends(command.spawn().unwrap());
        until(line, || is_begun(self).then_some(()));
        signal(child.0.id(), Signal::SIGTERM);
        until("its end", || child.0.try_wait().unwrap());
    }

    fn types(&self, line: &str) {
        let words = words_of(line);
        let has = |word: &str| words.iter().any(|given| given == word);
        let before: BTreeSet<String> = self.rows().iter().map(|row| row["id"].to_string()).collect();
        let is_new = |row: &Value| !before.contains(&row["id"].to_string()) && row["child_pid"].is_u64();
        let is_more = |reader: &Reader| reader.rows().iter().any(is_new);
        let fine = [Some(0)];
        let (code, said) = match words[1].as_str() {
            "run" if has("-d") => {
                self.run("outlast stop night");
                let begun = self.run(line);
                // The next command finds the session as `have_all` starts it, and no other.
                for row in self.rows().iter().filter(|row| is_new(row)) {
                    self.run(&format!("outlast stop {}", row["id"].as_str().expect("an id")));
                }
                self.run("outlast stop night");
                begun
            }
            "run" => return self.begins(line, is_more),
            "gateway" if !has("check") && !has("hash-key") => return self.begins(line, is_more),
            "logs" if has("-f") => {
                let (code, said) = self.run(&line.replace("-f", "-n 3"));
                assert!(!said.is_empty(), "`{line}`");
                (code, said)
            }
            // Only a session that was interrupted can be restored.
            "restore" if has("night") => {
                let rows = self.rows();
                let night = rows.iter().find(|row| row["id"] == "night").expect("the session runs");
                let pid = night["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("it has a process");
                signal(pid, Signal::SIGKILL);
                until("the end of the session", || (!self.is_there("night")).then_some(()));
                self.run(line)
            }
            // The command needs a terminal, and gets as far as that error.
            "attach" => {
                let (code, said) = self.run(line);
                assert!(code == Some(2) && said.contains("terminal"), "`{line}`: {code:?} {said}");
                return;
            }
            // The gateway of this reader is in no cluster, and the command gets as far as that error.
            _ if has("--cluster") => {
                let (code, said) = self.run(line);
                assert!(code == Some(1) && said.contains("cluster"), "`{line}`: {code:?} {said}");
                return;
            }
            _ => self.run(line),
        };
        let may_ask = ["wrap", "unwrap", "startup"].contains(&words[1].as_str());
        let asks = may_ask && !has("--yes") && !has("--dry-run");
        let is_answered = asks && code == Some(2) && said.contains("stdin is not a terminal");
        // The state of this machine is not tested here.
        let is_verdict = words[1] == "doctor" && code == Some(1) && !said.starts_with("error");
        assert!(fine.contains(&code) || is_answered || is_verdict, "`{line}`: {code:?}\n{said}");
    }

    /// Stops all that the commands left running: `outlast restore` also starts other sessions that were interrupted.
    fn stop_all(&self) {
        for row in self.rows() {
            if let Some(id) = row["id"].as_str() {
                self.run(&format!("outlast stop {id} --force"));
            }
        }
    }

    /// The processes with the home directory of this reader.
    fn processes(&self) -> Vec<u32> {
        let home = format!("HOME={}", self.place.path().display());
        let has_home = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == home.as_bytes())
        };
        pids().filter(has_home).collect()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop_all();
    }
}

/// Kills the process with the test, even if the test fails.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn words_of(line: &str) -> Vec<String> {
    crate::docs::words(line)
}

#[test]
fn every_command_in_the_book_has_the_described_effect() {
    let mut reader = Reader::new();
    let mut typed = BTreeSet::new();
    for (place, line) in commands() {
        let words = words_of(&line);
        // Usage lines, commands that were already run, and pages with a test of their own.
        let is_usage = words.iter().any(|word| word.starts_with('[') || word == "CMD…");
        let has_own_test = ["docs/tutorial.md:", "examples/"].iter().any(|page| place.contains(page));
        if is_usage || has_own_test || !typed.insert(words.clone()) {
            continue;
        }
        println!("{place}: {line}");
        reader.have_all();
        reader.types(&line);
    }
    reader.stop_all();
    (reader.tools, reader.weather) = (None, None);
    until("all processes of the commands to be gone", || reader.processes().is_empty().then_some(()));
    assert!(typed.len() > 50, "only {} commands were found", typed.len());
}
