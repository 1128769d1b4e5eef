//! An agent that has claude's composer and nothing else. What is sent to it is appended to `sent.log`, with a zero after
//! each. It does as its options say:
//!
//! - `late=MS`: draws no composer before so long
//! - `swallow=N`: does not hear the first N Enters
//! - `deaf`: shows nothing of what is typed
//! - `dialog`: asks something instead
//! - `draft`: has something typed already
//! - `leave`: ends when something was pasted

use std::{
    fs::OpenOptions,
    io::{Read, Write, stdin, stdout},
    thread,
    time::Duration,
};

use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};

const RULE: &str = "────────────────────────────────────────";
/// A longer text is shown as a mark of it.
const SHOWN_MAX: usize = 800;

pub fn run(words: &[String]) {
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
    let mut swallow = number("swallow=").unwrap_or(0);
    if !has("dialog") {
        draw(&draft);
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
                Key::Enter => {
                    let mut log = OpenOptions::new().create(true).append(true).open("sent.log").expect("a log");
                    log.write_all(format!("{}\0", std::mem::take(&mut draft)).as_bytes()).expect("a log");
                }
                Key::Letter(letter) => draft.push(letter.into()),
            }
            if !has("deaf") && !has("dialog") {
                draw(&draft);
            }
        }
    }
}

enum Key {
    Paste(String),
    Enter,
    Letter(u8),
}

/// The first key of what was typed, if it is all there.
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

fn draw(draft: &str) {
    let lines = draft.lines().count();
    let shown = if draft.len() > SHOWN_MAX { format!("[Pasted text #1 +{lines} lines]") } else { draft.to_owned() };
    let shown = shown.replace('\n', "\r\n  ");
    // The cursor rests behind what was typed.
    say(&format!("\x1b[2J\x1b[H{RULE}\r\n❯\u{a0}{shown}\x1b7\r\n{RULE}\r\n\x1b[2mhint\x1b[22m\x1b8"));
}

fn say(words: &str) {
    stdout().write_all(words.as_bytes()).and_then(|()| stdout().flush()).expect("a terminal");
}
