//! A test agent with claude's composer and transcript, and no other function. Each submitted text is appended to
//! `sent.log`, followed by a zero byte, and to the file of its conversation. Enter after a backslash is a line break,
//! and after a word with `@` it chooses a file. Options control it:
//!
//! - `late=MS`: draws no composer before this time
//! - `swallow=N`: ignores the first N Enters
//! - `deaf`: shows no input
//! - `dialog`: shows a dialog instead
//! - `draft`: starts with a draft
//! - `leave`: exits when a text is pasted
//! - `forgetful`: writes no transcript
//! - `busy=MS`: works for this time on each text, and answers it
//! - `limit=S`: reaches its usage limit at the first text, for this many seconds, and at each text before it is over
//! - `unrecorded`: records no limit, as if a tool had printed the notice

use std::{
    fs::{self, OpenOptions},
    io::{Read, Write, stdin, stdout},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
use serde_json::json;

const RULE: &str = "────────────────────────────────────────";
/// A longer text is shown as a placeholder.
const SHOWN_MAX: usize = 800;

pub(crate) fn run(words: &[String]) {
    let has = |word: &str| words.iter().any(|given| given.trim_start_matches('-') == word);
    let number =
        |name: &str| words.iter().find_map(|word| word.trim_start_matches('-').strip_prefix(name)?.parse::<u64>().ok());
    let mut termios = tcgetattr(stdin()).expect("a terminal");
    cfmakeraw(&mut termios);
    tcsetattr(stdin(), SetArg::TCSANOW, &termios).expect("a terminal");

    say("starting\r\n");
    thread::sleep(Duration::from_millis(number("late=").unwrap_or(0)));
    say("\x1b[?2004h");
    if has("dialog") {
        say(&format!("{RULE}\r\nDo you trust this folder?\r\n ❯ 1. Yes\r\n   2. No\r\n"));
    }
    let mut draft = if has("draft") { "a thought".to_owned() } else { String::new() };
    let mut above = String::new();
    let mut limited_until = None;
    let mut swallow = number("swallow=").unwrap_or(0);
    if !has("dialog") {
        draw(&above, &draft);
    }
    let mut input = Vec::new();
    let mut space = [0; 4096];
    loop {
        let count = stdin().read(&mut space).unwrap_or(0);
        if count == 0 {
            return;
        }
        input.extend_from_slice(&space[..count]);
        while let Some((key, length)) = first_key(&input) {
            input.drain(..length);
            match key {
                Key::Paste(_) if has("leave") => std::process::exit(1),
                _ if has("deaf") || has("dialog") => {}
                Key::Paste(text) => draft.push_str(&text),
                Key::Enter if swallow > 0 => swallow -= 1,
                Key::Enter if draft.ends_with('\\') => {
                    draft.pop();
                    draft.push('\n');
                }
                Key::Enter if draft.rsplit(char::is_whitespace).next().is_some_and(|word| word.contains('@')) => {
                    draft.truncate(draft.rfind('@').unwrap_or(0));
                    draft.push_str("chosen-file ");
                }
                Key::Enter => {
                    let text = std::mem::take(&mut draft).trim().to_owned();
                    let mut log = OpenOptions::new().create(true).append(true).open("sent.log").expect("a log");
                    log.write_all(format!("{text}\0").as_bytes()).expect("a log");
                    if !has("forgetful") {
                        record(words, &json!({"type": "user", "message": {"role": "user", "content": text}}));
                    }
                    if number("busy=").or(number("limit=")).is_some() {
                        above = format!("❯ {text}\r\n");
                    }
                    if let Some(time) = number("busy=") {
                        draw(&format!("{above}\r\n✻ Thinking… (1s)\r\n"), "");
                        thread::sleep(Duration::from_millis(time));
                        let answer = format!("re: {text}");
                        let part = json!({"type": "text", "text": answer});
                        let id =
                            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string();
                        record(
                            words,
                            &json!({"type": "assistant", "uuid": id, "message": {"id": id, "content": [part]}}),
                        );
                        above.push_str(&format!("● {answer}\r\n"));
                    }
                    if let Some(seconds) = number("limit=") {
                        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                        let until = *limited_until.get_or_insert(now + seconds);
                        if now < until {
                            let notice = format!("You've hit your session limit · resets in {}s", until - now);
                            if !has("unrecorded") {
                                let part = json!({"type": "text", "text": notice});
                                record(
                                    words,
                                    &json!({"type": "assistant", "isApiErrorMessage": true, "error": "rate_limit",
                                    "quotaLimits": {"resetsAt": until}, "message": {"content": [part]}}),
                                );
                            }
                            above =
                                format!("❯ {text}\r\n  ⎿  {notice}\r\n     /upgrade to increase your usage limit.\r\n");
                        }
                    }
                }
                Key::Letter(END_OF_LINE) => {}
                Key::Letter(KILL_LINE) => draft.truncate(draft.rfind('\n').map_or(0, |at| at + 1)),
                Key::Letter(BACKSPACE) => drop(draft.pop()),
                Key::Letter(letter) => draft.push(letter.into()),
            }
            if !has("deaf") && !has("dialog") {
                draw(&above, &draft);
            }
        }
    }
}

const END_OF_LINE: u8 = 0x05;
const KILL_LINE: u8 = 0x15;
const BACKSPACE: u8 = 0x7f;

/// As claude does, in the file of the conversation that it was started with.
fn record(words: &[String], line: &serde_json::Value) {
    let id = words.iter().skip_while(|word| !matches!(word.as_str(), "--session-id" | "--resume")).nth(1);
    let (Some(id), Some(home)) = (id, std::env::home_dir()) else { return };
    let folder = home.join(".claude/projects/p");
    fs::create_dir_all(&folder).expect("a folder");
    let file = OpenOptions::new().create(true).append(true).open(folder.join(format!("{id}.jsonl")));
    file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())).expect("a transcript");
}

enum Key {
    Paste(String),
    Enter,
    Letter(u8),
}

/// The first key of the input, if it is complete.
fn first_key(input: &[u8]) -> Option<(Key, usize)> {
    const BEGIN: &[u8] = b"\x1b[200~";
    const END: &[u8] = b"\x1b[201~";
    if let Some(rest) = input.strip_prefix(BEGIN) {
        let length = rest.windows(END.len()).position(|window| window == END)?;
        let text = String::from_utf8_lossy(&rest[..length]).into_owned();
        return Some((Key::Paste(text), BEGIN.len() + length + END.len()));
    }
    if BEGIN.starts_with(input) {
        return None;
    }
    Some((if input[0] == b'\r' { Key::Enter } else { Key::Letter(input[0]) }, 1))
}

/// `above`: the conversation.
fn draw(above: &str, draft: &str) {
    let lines = draft.lines().count();
    let shown = if draft.len() > SHOWN_MAX { format!("[Pasted text #1 +{lines} lines]") } else { draft.to_owned() };
    let shown = shown.replace('\n', "\r\n  ");
    // The cursor is after the typed text.
    say(&format!("\x1b[2J\x1b[H{above}{RULE}\r\n❯\u{a0}{shown}\x1b7\r\n{RULE}\r\n\x1b[2mhint\x1b[22m\x1b8"));
}

fn say(words: &str) {
    stdout().write_all(words.as_bytes()).and_then(|()| stdout().flush()).expect("a terminal");
}
