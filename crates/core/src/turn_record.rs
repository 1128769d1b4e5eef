//! The turns that an agent writes down itself: lines of claude's transcript and of codex's rollout file. Reads one line;
//! finding and reading the files is the driver's work.

use serde_json::Value;

use crate::agent::Kind;

/// What was submitted, in the words that were typed, if this line says so. A queued shell command is written down without
/// its `!`, so there may be two readings.
pub fn submitted(kind: Kind, line: &[u8]) -> Vec<String> {
    // Most lines are none, and some are long.
    let may_be = |word: &[u8]| memchr::memmem::find(line, word).is_some();
    let is_candidate = match kind {
        Kind::Claude => may_be(b"\"user\"") || may_be(b"local_command") || may_be(b"\"enqueue\""),
        Kind::Codex => may_be(b"\"user\"") || may_be(b"\"user_message\""),
        _ => false,
    };
    let record = || serde_json::from_slice::<Value>(line).ok();
    let Some(record) = is_candidate.then(record).flatten() else { return Vec::new() };
    match kind {
        Kind::Claude => by_claude(&record),
        _ => by_codex(&record).into_iter().collect(),
    }
}

fn by_claude(record: &Value) -> Vec<String> {
    match record["type"].as_str() {
        Some("queue-operation") if record["operation"] == "enqueue" => {
            let text = record["content"].as_str().into_iter();
            text.flat_map(|text| [text.to_owned(), format!("!{text}")]).collect()
        }
        Some("system") if record["subtype"] == "local_command" => {
            record["content"].as_str().and_then(command).into_iter().collect()
        }
        // A text of claude's own has `isMeta`.
        Some("user") if record["isMeta"] != true && record["isSidechain"] != true => {
            let Some(text) = content(&record["message"]["content"]) else { return Vec::new() };
            let shell = inside(&text, "<bash-input>", "</bash-input>").map(|line| format!("!{line}"));
            vec![shell.or_else(|| command(&text)).unwrap_or(text)]
        }
        _ => Vec::new(),
    }
}

fn by_codex(record: &Value) -> Option<String> {
    let about = &record["payload"];
    let text = match about["type"].as_str()? {
        "message" if about["role"] == "user" => content(&about["content"])?,
        "user_message" => about["message"].as_str()?.to_owned(),
        _ => return None,
    };
    let is_shell = text.starts_with("<user_shell_command>");
    let shell = is_shell.then(|| inside(&text, "<command>", "</command>")).flatten();
    Some(shell.map_or_else(|| text.clone(), |line| format!("!{line}")))
}

/// A slash command, as claude writes it down.
fn command(text: &str) -> Option<String> {
    let name = inside(text, "<command-name>", "</command-name>")?;
    let args = inside(text, "<command-args>", "</command-args>").unwrap_or_default();
    Some(format!("{name} {args}").trim_end().to_owned())
}

fn inside<'a>(text: &'a str, begin: &str, end: &str) -> Option<&'a str> {
    let from = text.find(begin)? + begin.len();
    let length = text[from..].find(end)?;
    Some(text[from..from + length].trim())
}

fn content(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            (!texts.is_empty()).then(|| texts.concat())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_what_was_submitted() {
        use Kind::*;
        #[rustfmt::skip]
        let table: [(Kind, &str, &[&str]); 16] = [
            (Claude, r#"{"type":"user","message":{"role":"user","content":"what is $x"}}"#, &["what is $x"]),
            (Claude, r#"{"type":"user","message":{"role":"user","content":[{"type":"text","text":"a"},{"type":"image"},{"type":"text","text":"b"}]}}"#, &["ab"]),
            (Claude, r#"{"type":"user","message":{"role":"user","content":[{"type":"tool_result","content":"x"}]}}"#, &[]),
            (Claude, r#"{"type":"user","isMeta":true,"message":{"role":"user","content":"its own"}}"#, &[]),
            (Claude, r#"{"type":"user","isSidechain":true,"message":{"role":"user","content":"for another agent"}}"#, &[]),
            (Claude, r#"{"type":"user","message":{"role":"user","content":"<bash-input>echo hi</bash-input>"}}"#, &["!echo hi"]),
            (Claude, r#"{"type":"system","subtype":"local_command","content":"<command-name>/context</command-name>\n <command-message>context</command-message>\n <command-args></command-args>"}"#, &["/context"]),
            (Claude, r#"{"type":"user","message":{"content":"<command-message>x</command-message>\n<command-name>/x</command-name>\n<command-args>a b</command-args>"}}"#, &["/x a b"]),
            (Claude, r#"{"type":"queue-operation","operation":"enqueue","content":"later"}"#, &["later", "!later"]),
            (Claude, r#"{"type":"queue-operation","operation":"dequeue"}"#, &[]),
            (Claude, r#"{"type":"assistant","message":{"content":"\"user\""}}"#, &[]),
            (Claude, r#"{"type":"user","#, &[]),
            (Codex, r#"{"type":"response_item","payload":{"type":"message","role":"user","content":[{"type":"input_text","text":"hello"}]}}"#, &["hello"]),
            (Codex, r#"{"type":"event_msg","payload":{"type":"user_message","message":"hello"}}"#, &["hello"]),
            (Codex, r#"{"payload":{"type":"message","role":"user","content":[{"text":"<user_shell_command>\n<command>\necho hi\n</command>\n<result>"}]}}"#, &["!echo hi"]),
            (Other, r#"{"type":"user","message":{"content":"x"}}"#, &[]),
        ];
        for (kind, line, expected) in table {
            assert_eq!(submitted(kind, line.as_bytes()), expected, "{line}");
        }
    }
}
