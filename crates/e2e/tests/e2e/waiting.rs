//! Waiting for an agent, and events when it waits for a person.

use std::{
    fs,
    io::Write,
    os::unix::{fs::PermissionsExt, net::UnixStream},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::run::{OUTLAST, PATIENCE, World, answer, text};

/// It acts like claude: a composer, a spinner, a dialog, and a hang. Input lines control it.
const CLAUDE: &str = r#"#!/bin/bash
echo "$*" >> args.log
mkdir -p "$HOME/.claude/projects/p"; echo '{"type":"user"}' > "$HOME/.claude/projects/p/$2.jsonl"
composer() { printf '\r\n──────\r\n❯ '; }
printf '\033[?2004h'
composer
while read -r word rest; do
    printf '\033[2J\033[H'
    case "$word" in
        work) for n in 1 2 3 4 5 6 7 8; do printf '\r✻ Thinking… (%s · esc to interrupt)' "$n"; sleep 0.1; done
              printf '\033[2J\033[Hdone with %s\r\n' "$rest"; composer ;;
        hang) printf '✻ Thinking… (esc to interrupt)'; sleep 300 ;;
        ask)  printf 'Do you want to proceed?\r\n❯ 1. Yes\r\n  2. No\r\n' ;;
        *)    composer ;;
    esac
done
"#;

fn claude(world: &World) {
    let path = world.path().join("claude");
    fs::write(&path, CLAUDE).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn begin(world: &World, options: &[&str], program: &str) {
    let output = world.outlast(&[&["run", "-d", "--session", "s"], options, &["--", program]].concat());
    assert_eq!(text(&output.stdout), "s\n", "{}", text(&output.stderr));
    world.until_there();
}

fn tell(world: &World, words: &str) {
    let output = world.outlast(&["inject", "s", words, "--enter"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn lines_of(world: &World, file: &str, count: usize) -> Vec<Value> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let read = fs::read_to_string(world.path().join(file)).unwrap_or_default();
        let lines: Vec<Value> = read.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        if lines.len() >= count {
            return lines;
        }
        assert!(Instant::now() < deadline, "only this was notified: {read}\n{}", world.log("s"));
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn wait_for_returns_on_text_quiet_or_prompt() {
    let world = World::new();
    claude(&world);
    begin(&world, &[], "./claude");
    let wait = |args: &[&str]| world.outlast(&[&["wait-for", "s"], args].concat());
    assert!(wait(&["--prompt", "--timeout", "60s"]).status.success());
    // Words that are already shown, and words that come later.
    assert!(wait(&["--text", "❯"]).status.success());
    let mut waiter = Command::new(OUTLAST);
    let mut waiter = world
        .environment(&mut waiter)
        .args(["wait-for", "s", "--text", "done with it", "--timeout", "60s", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    tell(&world, "work it");
    // It waits for the next prompt, not the earlier one.
    assert!(wait(&["--prompt", "--timeout", "60s"]).status.success());
    let shown = text(&world.outlast(&["screen", "s"]).stdout);
    assert!(shown.starts_with("done with it\n"), "{shown}");
    assert!(waiter.wait().unwrap().success());
    assert!(wait(&["--quiet", "200ms", "--timeout", "60s"]).status.success());
    // A timeout has its own exit code and message.
    let late = wait(&["--text", "never", "--timeout", "0.1"]);
    assert_eq!(late.status.code(), Some(124));
    let words = text(&late.stderr);
    assert!(words.starts_with("error: `s` did not show `never` within 0.1 s"), "{words}");
    let late = wait(&["--quiet", "1h", "--timeout", "100ms", "--json"]);
    assert_eq!((late.status.code(), text(&late.stdout).trim()), (Some(124), r#"{"met":false,"timed_out":true}"#));
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn text_that_scrolls_away_is_found() {
    let world = World::new();
    let script = "#!/bin/sh\nprintf 'ready> '\nread -r line\nseq 1 3000\necho NEEDLE\nseq 1 3000\nprintf 'ready> '\nread -r line\n";
    fs::write(world.path().join("agent"), script).unwrap();
    begin(&world, &[], "./agent");
    let mut waiter = Command::new(OUTLAST);
    let waiter =
        world.environment(&mut waiter).args(["wait-for", "s", "--text", "NEEDLE", "--timeout", "60s", "--json"]);
    let waiter = waiter.stdout(Stdio::piped()).spawn().unwrap();
    // It must wait before the words come; many other clients may wait too.
    let mut others: Vec<UnixStream> = (0..20).map(|_| ask(&world, json!({"text": "NEEDLE"}))).collect();
    world.until("waiters", json!(21));
    tell(&world, "go");
    let output = waiter.wait_with_output().unwrap();
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("\"met\":true"));
    for other in &mut others {
        assert_eq!(answer(other)["ok"]["met"], true);
    }
    assert!(world.outlast(&["stop", "s"]).status.success());
}

fn ask(world: &World, params: Value) -> UnixStream {
    request(world, "wait_for", params)
}

fn request(world: &World, method: &str, params: Value) -> UnixStream {
    let mut stream = UnixStream::connect(world.home.path().join(".local/state/outlast/run/s.sock")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = json!({"v": 1, "id": 1, "method": method, "params": params}).to_string();
    stream.write_all(&(request.len() as u32).to_be_bytes()).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

#[test]
fn disconnected_waiters_free_their_places() {
    let world = World::new();
    begin(&world, &[], "./agent");
    for _ in 0..5 {
        let gone: Vec<UnixStream> = (0..50).map(|_| ask(&world, json!({"text": "never"}))).collect();
        assert_eq!(world.state()["state"], "ready");
        drop(gone);
    }
    let mut late = ask(&world, json!({"quiet": 0.0}));
    assert_eq!(answer(&mut late)["ok"]["met"], true);
    for (params, code) in [
        (json!({}), "bad_request"),
        (json!({"text": "a", "quiet": 1}), "bad_request"),
        (json!({"text": ""}), "bad_request"),
        (json!({"quiet": -1}), "bad_request"),
        (json!({"prompt": false}), "bad_request"),
        (json!({"prompt": true, "timeout": "soon"}), "bad_request"),
    ] {
        assert_eq!(answer(&mut ask(&world, params.clone()))["error"]["code"], code, "{params}");
    }
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn a_notification_is_sent_when_the_agent_waits() {
    let world = World::new();
    claude(&world);
    begin(&world, &["--notify", "cat >> notified.jsonl"], "./claude");
    let mut events = request(&world, "subscribe", json!({}));
    assert_eq!(answer(&mut events)["ok"]["subscribed"], true);
    let first = &lines_of(&world, "notified.jsonl", 1)[0];
    assert_eq!((&first["event"], &first["stance"]), (&json!("waiting_for_input"), &json!("prompt")));
    assert_eq!(
        (&first["session"], &first["program"], &first["attached"]),
        (&json!("s"), &json!("./claude"), &json!(0))
    );
    let state = world.until("waiting_for_input", json!(true));
    assert_eq!(state["stance"], "prompt");
    tell(&world, "work");
    world.until("waiting_for_input", json!(false));
    world.until("waiting_for_input", json!(true));
    tell(&world, "ask");
    world.until("stance", json!("dialog"));
    let stances: Vec<Value> = lines_of(&world, "notified.jsonl", 3).iter().map(|line| line["stance"].clone()).collect();
    assert_eq!(stances, ["prompt", "prompt", "dialog"]);
    // A subscribed client gets both events, the beginning and the end.
    let mut heard = Vec::new();
    while heard.len() < 4 {
        let event = answer(&mut events);
        if event["event"] == "waiting_for_input" {
            heard.push((event["waiting"].as_bool().unwrap(), event["stance"].as_str().unwrap().to_owned()));
        }
    }
    let end: Vec<(bool, &str)> = heard.iter().map(|(is, stance)| (*is, stance.as_str())).collect();
    assert_eq!(end[end.len() - 3..], [(false, "busy"), (true, "prompt"), (true, "dialog")]);
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn an_unknown_agent_waits_when_it_is_quiet() {
    let world = World::new();
    begin(&world, &[], "./agent");
    let state = world.until("waiting_for_input", json!(true));
    assert_eq!(state["stance"], "unclear");
    assert!(world.outlast(&["wait-for", "s", "--prompt", "--timeout", "60s"]).status.success());
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn a_notification_that_fails_or_floods_disturbs_no_session() {
    let world = World::new();
    begin(&world, &["--notify", "yes; exit 3"], "./agent");
    world.until("waiting_for_input", json!(true));
    tell(&world, "hello");
    assert!(world.outlast(&["wait-for", "s", "--text", "heard hello", "--timeout", "60s"]).status.success());
    let since = Instant::now();
    assert!(world.outlast(&["stop", "s"]).status.success());
    assert!(since.elapsed() < PATIENCE);
    let world = World::new();
    begin(&world, &["--notify", "exit 3"], "./agent");
    let deadline = Instant::now() + PATIENCE;
    while !world.log("s").contains("the notification ended with exit code 3") {
        assert!(Instant::now() < deadline, "{}", world.log("s"));
        thread::sleep(Duration::from_millis(20));
    }
    assert!(world.outlast(&["stop", "s"]).status.success());
}

#[test]
fn an_agent_that_hangs_is_started_again_with_its_conversation() {
    let world = World::new();
    claude(&world);
    begin(&world, &["--hang-timeout", "1", "--notify", "cat >> notified.jsonl"], "./claude");
    // At its prompt it may be silent for any time.
    world.until("waiting_for_input", json!(true));
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(world.state()["restarts"], 0);
    tell(&world, "hang");
    let state = world.until("restarts", json!(1));
    let conversation = state["conversation"].as_str().unwrap();
    world.until("waiting_for_input", json!(true));
    assert_eq!(world.starts(), [format!("--session-id {conversation}"), format!("--resume {conversation}")]);
    let log = world.log("s");
    assert!(log.contains(" agent_hung silent_s="), "{log}");
    assert!(log.contains("class=transient") && log.contains("hung: silent for "), "{log}");
    // They run in parallel, so two close events may change their order.
    let mut events: Vec<String> =
        lines_of(&world, "notified.jsonl", 4).iter().map(|line| line["event"].as_str().unwrap().to_owned()).collect();
    events.sort();
    assert_eq!(events, ["crashed", "hung", "waiting_for_input", "waiting_for_input"]);
    assert!(world.outlast(&["stop", "s"]).status.success());
}
