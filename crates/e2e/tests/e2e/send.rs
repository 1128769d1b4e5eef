//! `outlast send`: a text reaches the agent, or the error says why not.

use std::{
    fs,
    process::{Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::support::{COMPOSER, OUTLAST};

const PATIENCE: Duration = Duration::from_secs(60);

/// A session `s` in the background, with an agent that looks like claude.
struct World {
    home: TempDir,
    project: TempDir,
}

impl World {
    fn new() -> World {
        let world = World { home: tempfile::tempdir().unwrap(), project: tempfile::tempdir().unwrap() };
        std::os::unix::fs::symlink(COMPOSER, world.project.path().join("claude")).unwrap();
        world
    }

    fn start(words: &[&str]) -> World {
        let world = World::new();
        // As options: another word would be an initial prompt.
        let words: Vec<String> = words.iter().map(|word| format!("--{word}")).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let started = world.outlast(&[&["run", "-d", "--session", "s", "--", "./claude"], &words[..]].concat());
        assert!(started.status.success(), "{}", text(&started.stderr));
        world
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(OUTLAST);
        command.current_dir(self.project.path()).env("HOME", self.home.path()).args(args).stdin(Stdio::null());
        command
    }

    fn outlast(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn send(&self, args: &[&str]) -> Value {
        let output = self.outlast(&[&["send", "s", "--json"], args].concat());
        let answer: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
        assert_eq!(output.status.success(), answer["error"].is_null(), "{answer}");
        answer
    }

    /// The texts that the agent received.
    fn sent(&self) -> Vec<String> {
        let log = fs::read_to_string(self.project.path().join("sent.log")).unwrap_or_default();
        log.split_terminator('\0').map(str::to_owned).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.outlast(&["stop", "s", "--force"]);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_text_arrives_once_and_complete() {
    let world = World::start(&["late=700"]);
    let long: String = (0..1200).map(|line| format!("line {line}\n")).collect();
    for words in ["hello", "two\nlines", long.trim_end()] {
        let answer = world.send(&[words, "--submit"]);
        assert_eq!(
            (&answer["submitted"], &answer["presses"], &answer["as_paste"]),
            (&json!(true), &json!(1), &json!(true))
        );
        assert_eq!(answer["result"], "submitted");
        let proof = json!({"seen_in_composer": true, "left_composer": true, "recorded_by": "transcript"});
        assert_eq!(answer["proof"], proof);
    }
    assert_eq!(world.sent(), ["hello", "two\nlines", long.trim_end()]);

    // From a pipe, with output for people, and without Enter.
    let mut child = world.command(&["send", "s"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"a draft\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(text(&output.stdout).starts_with("Typed into s: 7 bytes in "), "{}", text(&output.stdout));
    assert!(text(&world.outlast(&["screen", "s"]).stdout).contains("❯\u{a0}a draft"));
    assert_eq!(world.sent().len(), 3);
    let log = fs::read_to_string(world.project.path().join(".outlast/logs/s.log")).unwrap();
    assert!(log.contains(" send bytes=5 submit=true") && log.contains(" send_ended result=submitted"), "{log}");
    assert!(!log.contains("hello"), "nothing that was said is in it");
}

#[test]
fn an_enter_without_effect_is_repeated_a_limited_number_of_times() {
    let world = World::start(&["swallow=1"]);
    let answer = world.send(&["hello", "--submit"]);
    assert_eq!((&answer["submitted"], &answer["presses"]), (&json!(true), &json!(2)));
    assert_eq!(world.sent(), ["hello"]);

    let world = World::start(&["swallow=9"]);
    let answer = world.send(&["hello", "--submit"]);
    assert_eq!(answer["error"]["code"], "not_submitted");
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(message, "Enter was pressed 3 times and did not submit the text; it was removed again. It was: hello");
    assert!(answer["error"]["screen"].as_str().unwrap().contains("❯\u{a0}hello"), "as it was");
    assert_eq!(answer["error"]["removed"], true);
    assert!(world.sent().is_empty());
}

#[test]
fn a_text_that_was_not_submitted_does_not_block_the_next() {
    let world = World::start(&["swallow=3"]);
    assert_eq!(world.send(&["two\nlines", "--submit"])["error"]["code"], "not_submitted");
    assert_eq!(world.send(&["again", "--submit"])["result"], "submitted");
    assert_eq!(world.sent(), ["again"]);
}

#[test]
fn a_turn_that_the_agent_does_not_record_is_unproven() {
    let world = World::start(&["forgetful"]);
    let answer = world.send(&["hello", "--submit"]);
    assert_eq!((&answer["result"], &answer["submitted"]), (&json!("unproven"), &json!(false)));
    let proof = json!({"seen_in_composer": true, "left_composer": true, "recorded_by": null});
    assert_eq!(answer["proof"], proof);
    assert_eq!(world.sent(), ["hello"]);
    let words = text(&world.outlast(&["send", "s", "again", "--submit"]).stdout);
    assert!(words.starts_with("Entered, without proof, into s: 5 bytes in "), "{words}");
}

/// Enter alone would insert a line break in the first, and choose a file for the second.
#[test]
fn a_text_is_submitted_as_it_is() {
    let world = World::start(&[]);
    let texts = ["ends in \\", "see @x", "what is $x", "👨‍👩‍👧 and 👍🏽", "a\u{200b}b", "cafe\u{301}"];
    for words in texts {
        let answer = world.send(&[words, "--submit"]);
        assert_eq!((&answer["result"], &answer["presses"]), (&json!("submitted"), &json!(1)), "{words}: {answer}");
    }
    assert_eq!(world.sent(), texts);
}

#[test]
fn a_text_that_does_not_arrive_is_reported_in_a_sentence() {
    let table = [
        ("dialog", "not_ready", "the agent showed no empty input field in time; nothing was typed"),
        ("draft", "occupied", "the input field contains other text; nothing was typed. It is: a thought"),
        ("deaf", "not_seen", "the text was typed and did not appear; the input field is empty"),
        ("leave", "ended", "the agent ended; what was typed may have arrived"),
    ];
    for (word, code, message) in table {
        let world = World::start(&[word]);
        let answer = world.send(&["hello", "--submit", "--timeout", "2"]);
        assert_eq!((&answer["error"]["code"], &answer["error"]["message"]), (&json!(code), &json!(message)), "{word}");
        assert!(world.sent().is_empty());
    }
    let world = World::start(&[]);
    let mut words = String::new();
    for text_of in ["", " \n", "a\x1b[201~\x03"] {
        let output = world.outlast(&["send", "s", text_of, "--submit"]);
        words.push_str(&text(&output.stderr));
        assert_eq!(output.status.code(), Some(2));
    }
    insta::assert_snapshot!(words, @"
    error: the text did not reach `s`
      because: there is nothing to send
      hint: give the text after the id, `outlast send s TEXT`, or on stdin
    error: the text did not reach `s`
      because: there is nothing to send
      hint: give the text after the id, `outlast send s TEXT`, or on stdin
    error: the text did not reach `s`
      because: the text contains a control character, U+001B
      hint: `outlast inject s` types keys and any other bytes
    ");
    assert_eq!(world.send(&["", "--submit"])["error"]["code"], "bad_request");
    let nothing = world.outlast(&["inject", "s", ""]);
    assert_eq!(nothing.status.code(), Some(2));
    assert!(
        text(&nothing.stderr).starts_with("error: there is nothing to type\n  hint: "),
        "{}",
        text(&nothing.stderr)
    );
    let unknown = text(&world.outlast(&["send", "sss", "x"]).stderr);
    assert!(unknown.contains("no instance named `sss` is running"), "{unknown}");
}

#[test]
fn simultaneous_texts_are_sent_in_turn() {
    let world = World::start(&[]);
    let words: Vec<String> = (0..8).map(|number| format!("text {number}")).collect();
    thread::scope(|scope| {
        for word in &words {
            scope.spawn(|| assert_eq!(world.send(&[word, "--submit"])["submitted"], true));
        }
        // The same key means the same text, however often it is sent.
        for _ in 0..3 {
            scope.spawn(|| assert_eq!(world.send(&["keyed", "--submit", "--key", "k"])["submitted"], true));
        }
    });
    assert_eq!(world.send(&["keyed", "--submit", "--key", "k"])["repeated"], true);
    let mut sent = world.sent();
    sent.sort();
    assert_eq!(sent, [&["keyed".to_owned()], &words[..]].concat());
}

#[test]
fn a_waiting_text_is_sent_to_the_next_agent() {
    // It exits at the first paste; the second text has not been typed by then.
    let world = World::start(&["leave"]);
    let (first, second) = thread::scope(|scope| {
        let first = scope.spawn(|| world.send(&["one", "--submit"]));
        let deadline = Instant::now() + PATIENCE;
        let log = || fs::read_to_string(world.project.path().join(".outlast/logs/s.log")).unwrap_or_default();
        while !log().contains(" send bytes=3") {
            assert!(Instant::now() < deadline, "it was never asked");
            thread::sleep(Duration::from_millis(10));
        }
        let second = scope.spawn(|| world.send(&["two", "--submit"]));
        (first.join().unwrap(), second.join().unwrap())
    });
    assert_eq!((&first["error"]["code"], &second["error"]["code"]), (&json!("ended"), &json!("ended")));
    let log = fs::read_to_string(world.project.path().join(".outlast/logs/s.log")).unwrap();
    assert_eq!(log.matches(" agent_exit ").count(), 2, "each was typed to an agent of its own: {log}");
}

#[test]
fn a_text_reaches_an_agent_without_a_profile() {
    let world = World::new();
    let script = "printf 'ready> '; while read -r line; do echo \"$line\" >> sent.log; printf 'ready> '; done";
    assert!(world.outlast(&["run", "-d", "--session", "s", "--", "sh", "-c", script]).status.success());
    for words in ["hello", &"a long text that does not fit into one line of its terminal ".repeat(3)] {
        let answer = world.send(&[words.trim_end(), "--submit"]);
        assert_eq!((&answer["result"], &answer["as_paste"]), (&json!("unproven"), &json!(false)));
    }
    let answer = world.send(&["two\nlines", "--submit", "--timeout", "1"]);
    assert_eq!(answer["error"]["code"], "no_paste");
    let sent = fs::read_to_string(world.project.path().join("sent.log")).unwrap();
    assert_eq!(sent.lines().count(), 2, "{sent}");
}
