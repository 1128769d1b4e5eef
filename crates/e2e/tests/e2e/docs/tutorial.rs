//! Follows the tutorial of the book as a reader does: it writes the files, runs the commands in a shell, and gives
//! the client the lines of the page. Nothing is installed: `.venv` is the environment of the peers.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::fs::symlink,
    process::{Child, ChildStdin, Command, Output, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
};

use super::{blocks, root};
use crate::{
    mcp::client::{PATIENCE, Place, until},
    support::{OUTLAST, peers::Peers},
};

struct Reader {
    place: Place,
    client: Option<Connected>,
    /// The server's source before the last change.
    before: String,
}

/// The tutorial's client, with the lines that it printed.
struct Connected {
    child: Child,
    /// None after Ctrl-D.
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Drop for Connected {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Reader {
    fn new(peers: &Peers) -> Reader {
        let place = Place::new();
        fs::create_dir(place.path().join("bin")).unwrap();
        fs::create_dir(place.path().join("home")).unwrap();
        symlink(OUTLAST, place.path().join("bin/outlast")).unwrap();
        let python = peers.python("python-2");
        symlink(python.parent().and_then(|bin| bin.parent()).unwrap(), place.path().join(".venv")).unwrap();
        place
            .write(".mcp.json", r#"{"mcpServers": {"notes": {"command": ".venv/bin/python", "args": ["server.py"]}}}"#);
        Reader { place, client: None, before: String::new() }
    }

    fn shell(&self, line: &str) -> Command {
        let project = self.place.path();
        let mut command = Command::new("sh");
        command.args(["-c", line]).current_dir(project).env_clear().env("HOME", project.join("home"));
        command.env("PATH", format!("{}:/usr/bin:/bin", project.join("bin").display()));
        command
    }

    fn run(&self, line: &str) -> (Output, String) {
        let output = self.shell(line).stdin(Stdio::null()).output().unwrap();
        let printed = String::from_utf8_lossy(&[output.stdout.clone(), output.stderr.clone()].concat()).into_owned();
        (output, printed)
    }

    /// Writes or changes the file that the sentence before the block names.
    fn file(&mut self, sentence: &str, block: &str) {
        if let Some(name) = sentence.split("Save this as `").nth(1).and_then(|rest| rest.split('`').next()) {
            self.place.write(name, block);
            return;
        }
        self.before = fs::read_to_string(self.place.path().join("server.py")).unwrap();
        let changed = if sentence.contains("above the last line") {
            let (above, last) = self.before.trim_end().rsplit_once('\n').expect("the server has lines");
            format!("{above}\n{block}{last}\n")
        } else {
            assert!(sentence.contains("at the end of `server.py`"), "where does this belong? {sentence}");
            format!("{}{block}", self.before)
        };
        self.place.write("server.py", &changed);
    }

    fn type_command(&mut self, sentence: &str, line: &str) {
        if line.contains("client.py") {
            let mut child =
                self.shell(&format!("exec {line}")).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
            let (sender, lines) = channel();
            thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
            let stdin = child.stdin.take();
            self.client = Some(Connected { child, stdin, lines });
            return;
        }
        let fails = sentence.contains("fails with exit code 1");
        let (output, printed) = self.run(line);
        assert_eq!(output.status.code(), Some(i32::from(fails)), "`{line}`: {printed}");
        // A person types more slowly than outlast notices the exit.
        if line.starts_with("kill ") {
            self.place.recorded("server_crashed", 1);
        }
        if fails {
            assert!(printed.contains("SyntaxError"), "`{line}`: {printed}");
        }
    }

    /// Types the lines that begin with `> `, and expects the lines that follow each of them.
    fn talk(&mut self, block: &str) {
        let client = self.client.as_mut().expect("the client was started");
        let mut rest_of_answer = false;
        for line in block.lines() {
            if let Some(typed) = line.strip_prefix("> ") {
                writeln!(client.stdin.as_mut().expect("stdin is piped"), "{typed}").unwrap();
                continue;
            }
            let next = || client.lines.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no answer `{line}`"));
            let mut answer = next();
            // An answer that the page cuts off with `…` may have further lines.
            while rest_of_answer && answer != line {
                answer = next();
            }
            match line.strip_suffix(" …") {
                Some(beginning) => assert!(answer.starts_with(beginning), "{answer}"),
                None => assert_eq!(answer, line),
            }
            rest_of_answer = line.ends_with(" …");
        }
    }

    fn disconnect(&mut self) {
        let mut client = self.client.take().expect("the client was started");
        client.stdin = None;
        until("the end of the client", || client.child.try_wait().unwrap());
        let (_, printed) = self.run("outlast ps");
        assert!(printed.contains("Nothing runs under outlast"), "{printed}");
    }
}

#[test]
fn the_tutorial_works_as_it_is_written() {
    let Some(peers) = Peers::find("the_tutorial_works_as_it_is_written") else { return };
    let page = fs::read_to_string(root().join("docs/tutorial.md")).unwrap();
    let lines: Vec<&str> = page.lines().collect();
    let mut reader = Reader::new(&peers);
    let (mut from, mut commands, mut answers) = (0, 0, 0);
    for (language, at, block) in blocks(&page) {
        let sentence = lines[from..at - 2].join("\n");
        from = at + block.lines().count();
        if sentence.contains("Remove the broken line again") {
            reader.place.write("server.py", &reader.before);
        }
        if sentence.contains("Stop the client with Ctrl-D") {
            reader.disconnect();
        }
        match language.as_str() {
            "python" => reader.file(&sentence, &block),
            // Steps that need the network are already done.
            "sh" if block.contains("pip install") => {}
            "sh" => {
                for line in block.lines() {
                    reader.type_command(&sentence, line);
                    commands += 1;
                }
            }
            "text" => {
                reader.talk(&block);
                answers += 1;
            }
            other => panic!("a block in {other}"),
        }
    }
    assert!(commands >= 8 && answers >= 5, "{commands} commands and {answers} conversations were found");
}
