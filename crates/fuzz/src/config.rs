//! Target `config`: files that people and other programs write. The first byte says which: `t` an `outlast.toml`, `j`
//! a JSON file of a client with servers for the gateway, `w` and `W` the same as JSON and TOML for `wrap`, `m` a
//! document, `s` the record of an HTTP session, `r` a text that is shown, such as stderr of a server.
//!
//! Reading ends with values or with errors that have a position in the file; `unwrap` restores a text that `wrap`
//! changed; a text that is shown has no secrets and no control characters, whether it is one text or many lines.

use std::{cell::RefCell, fs, path::PathBuf};

use outlast::{adopt::servers::Format, fuzzed};
use outlast_core::{
    cluster::homes,
    front::record::{Record, RecordKey},
    redact, visible,
};
use tempfile::TempDir;

use crate::script;

pub fn run(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else { return };
    let bytes = script::expand(rest);
    match kind {
        b'j' => check_configuration("servers.json", &bytes),
        b'w' => check_wrap(&bytes, Format::Json),
        b'W' => check_wrap(&bytes, Format::Toml),
        b'm' => check_document(&bytes),
        b's' => check_record(&bytes),
        b'r' => check_shown(&String::from_utf8_lossy(&bytes)),
        _ => check_configuration("outlast.toml", &bytes),
    }
}

thread_local! {
    static DIR: RefCell<TempDir> = RefCell::new(tempfile::tempdir().expect("a directory"));
}

/// Writes the bytes to a file in a directory of this thread.
fn write(name: &str, bytes: &[u8]) -> PathBuf {
    let path = DIR.with_borrow(|dir| dir.path().join(name));
    fs::write(&path, bytes).expect("a file");
    path
}

fn check_configuration(name: &str, bytes: &[u8]) {
    let path = write(name, bytes);
    let wrong = fuzzed::configuration(&path);
    fs::remove_file(&path).expect("the file");
    let text = String::from_utf8_lossy(bytes);
    for mistake in wrong {
        assert!(!mistake.sentence.is_empty(), "a mistake without words");
        let Some((line, column)) = mistake.place else { continue };
        // The end of the file is a valid position, too.
        let inside = text.split('\n').nth(line - 1).map(|line| line.chars().count() + 1);
        let is_inside = inside.is_some_and(|last| (1..=last).contains(&column));
        assert!(is_inside, "no line {line} with a column {column}: {}", mistake.sentence);
    }
}

fn check_wrap(bytes: &[u8], format: Format) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let wrapped = match fuzzed::wrap(text, format) {
        Ok(wrapped) => wrapped,
        Err(line) => {
            let lines = text.split('\n').count();
            return assert!((1..=lines).contains(&line), "no line {line} among {lines}");
        }
    };
    // If the text already contains outlast, `unwrap` does not restore the same text.
    if fuzzed::unwrap(text, text, format).as_deref() != Ok(text) {
        return;
    }
    let commands = (fuzzed::commands(text, format), fuzzed::commands(&wrapped, format));
    assert!(commands.0 == commands.1, "other commands after `wrap`: {commands:?}\n{text:?}\n{wrapped:?}");
    let again = fuzzed::wrap(&wrapped, format);
    assert!(again.as_ref() == Ok(&wrapped), "`wrap` changes what it has changed:\n{text:?}\n{wrapped:?}\n{again:?}");
    let unwrapped = fuzzed::unwrap(&wrapped, text, format);
    assert!(unwrapped.as_deref() == Ok(text), "not restored by `unwrap`:\n{text:?}\n{wrapped:?}\n{unwrapped:?}");
}

fn check_document(bytes: &[u8]) {
    let lines = bytes.split(|byte| *byte == b'\n').count();
    for line in fuzzed::document(&write("plan.md", bytes)) {
        assert!((1..=lines).contains(&line), "something is said to stand in line {line} of {lines}");
    }
}

/// A record that can be read is read as the same after it was written.
fn check_record(bytes: &[u8]) {
    let key = RecordKey(0);
    if let Ok(record) = Record::decode(key, bytes)
        && let Ok(written) = record.encode(key)
    {
        assert!(Record::decode(key, &written).as_ref() == Ok(&record), "another record: {record:?}");
    }
    let _ = (homes::decode(key, bytes), homes::decode_home(bytes));
}

fn check_shown(text: &str) {
    let redacted = redact::text(text);
    let mut lines = redact::Lines::default();
    let by_line: Vec<_> = text.split('\n').map(|line| lines.line(line)).collect();
    assert!(*redacted == by_line.join("\n"), "otherwise by line:\n{redacted:?}\n{by_line:?}");
    let shown = visible::text(&redacted);
    let is_plain = |letter: char| letter == '\n' || letter == '\t' || !visible::is_control(letter);
    assert!(shown.chars().all(is_plain), "controls a terminal: {shown:?}");
    assert!(!visible::cell(text).contains(['\n', '\t']), "more than a cell");
    for (start, length) in [("ghp_", 36), ("AKIA", 16)] {
        let secret = format!("{start}{}", "A1".repeat(length / 2));
        // As a part of a longer word it is no token.
        if text.contains(&secret) {
            continue;
        }
        let with = format!("{text} {secret} {text}");
        assert!(!redact::text(&with).contains(&secret), "{secret} is shown: {:?}", redact::text(&with));
    }
}
