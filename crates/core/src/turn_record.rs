//! The turns in an agent's own files: lines of claude's transcript and of codex's rollout file, as the text that was
//! submitted and as the answer to it. Finding and reading the files is the driver's work.

use serde_json::Value;

use crate::agent::Kind;

/// The submitted text, as it was typed, if this line records a turn. A queued shell command is recorded without its
/// `!`, so there may be two readings.
pub fn submitted(kind: Kind, line: &[u8]) -> Vec<String> {
    // Fast path: most lines record no turn, and some are long.
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

/// The last answer of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The record it is from: two turns with the same words have different ones.
    pub record: String,
    pub text: String,
}

/// The answer to the last turn in the agent's file, if there is one. The lines are the end of the file, in its order.
pub fn answer<'a>(kind: Kind, lines: impl DoubleEndedIterator<Item = &'a [u8]>) -> Option<Answer> {
    let may_be = |line: &[u8], word: &str| memchr::memmem::find(line, word.as_bytes()).is_some();
    let record = |line: &[u8]| serde_json::from_slice::<Value>(line).ok();
    let mut lines = lines.rev();
    match kind {
        Kind::Claude => {
            let mut found: Option<(String, Answer)> = None;
            for line in lines.filter(|line| may_be(line, "\"assistant\"") || may_be(line, "\"user\"")) {
                let Some(record) = record(line).filter(|record| record["isSidechain"] != true) else { continue };
                let text =
                    |part: &Value| (part["type"] == "text").then(|| part["text"].as_str().map(str::to_owned)).flatten();
                match record["type"].as_str() {
                    Some("assistant") => {
                        let parts = record["message"]["content"].as_array().into_iter().flatten();
                        let text = parts.filter_map(text).collect::<Vec<_>>().concat();
                        let message = record["message"]["id"].as_str().unwrap_or_default().to_owned();
                        match &mut found {
                            // A message has one line for each of its parts.
                            Some((id, answer)) if *id == message => answer.text.insert_str(0, &text),
                            Some(_) => break,
                            None if text.is_empty() => {}
                            None => {
                                let record = record["uuid"].as_str().unwrap_or_default().to_owned();
                                found = Some((message, Answer { record, text }));
                            }
                        }
                    }
                    // The turn itself: what is before it answers another one.
                    Some("user") if !by_claude(&record).is_empty() => break,
                    _ => {}
                }
            }
            found.map(|(_, answer)| answer)
        }
        Kind::Codex => {
            lines.find(|line| may_be(line, "\"task_complete\"") || may_be(line, "\"task_started\"")).and_then(|line| {
                let record = record(line)?;
                let about = &record["payload"];
                let text = about["last_agent_message"].as_str()?.to_owned();
                Some(Answer { record: about["turn_id"].as_str().unwrap_or_default().to_owned(), text })
            })
        }
        Kind::Described | Kind::Shell | Kind::Other | Kind::NotInteractive => None,
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
        // A text that claude itself wrote has `isMeta`.
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

/// A slash command, in the form that claude records.
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
    fn the_last_turn_has_an_answer() {
        const ASKED: &str = r#"{"type":"user","message":{"role":"user","content":"what is it"}}"#;
        const TOOL: &str = r#"{"type":"user","message":{"content":[{"type":"tool_result","content":"x"}]}}"#;
        const THINKS: &str =
            r#"{"type":"assistant","uuid":"u1","message":{"id":"m1","content":[{"type":"thinking","thinking":"hm"}]}}"#;
        const ONE: &str =
            r#"{"type":"assistant","uuid":"u2","message":{"id":"m1","content":[{"type":"text","text":"It is "}]}}"#;
        const TWO: &str =
            r#"{"type":"assistant","uuid":"u3","message":{"id":"m1","content":[{"type":"text","text":"a lexer"}]}}"#;
        const USES: &str =
            r#"{"type":"assistant","uuid":"u4","message":{"id":"m1","content":[{"type":"tool_use","name":"x"}]}}"#;
        const LATER: &str =
            r#"{"type":"assistant","uuid":"u5","message":{"id":"m2","content":[{"type":"text","text":"done"}]}}"#;
        const BELOW: &str = r#"{"type":"assistant","uuid":"u6","isSidechain":true,"message":{"id":"m3","content":[{"type":"text","text":"no"}]}}"#;
        const SYSTEM: &str = r#"{"type":"system","subtype":"turn_duration"}"#;
        const CODEX: &str =
            r#"{"type":"event_msg","payload":{"type":"task_complete","turn_id":"t1","last_agent_message":"It is"}}"#;
        const CODEX_NONE: &str =
            r#"{"type":"event_msg","payload":{"type":"task_complete","turn_id":"t2","last_agent_message":null}}"#;
        const CODEX_BEGAN: &str = r#"{"type":"event_msg","payload":{"type":"task_started","turn_id":"t3"}}"#;
        #[rustfmt::skip]
        let table = [
            (Kind::Claude, vec![ASKED, THINKS, ONE, TWO, SYSTEM],         Some(("u3", "It is a lexer"))),
            (Kind::Claude, vec![ASKED, ONE, USES, TOOL, LATER, BELOW],    Some(("u5", "done"))),
            (Kind::Claude, vec![ASKED, ONE, USES, TOOL],                  Some(("u2", "It is "))),
            (Kind::Claude, vec![ASKED, LATER, ASKED],                     None),
            (Kind::Claude, vec![ASKED, LATER, ASKED, THINKS],             None),
            (Kind::Claude, vec![LATER, "{"],                              Some(("u5", "done"))),
            (Kind::Claude, Vec::new(),                                        None),
            (Kind::Codex,  vec![CODEX_BEGAN, CODEX],                      Some(("t1", "It is"))),
            (Kind::Codex,  vec![CODEX, CODEX_BEGAN],                      None),
            (Kind::Codex,  vec![CODEX, CODEX_NONE],                       None),
            (Kind::Codex,  Vec::new(),                                        None),
            (Kind::Other,  vec![LATER],                                   None),
        ];
        for (kind, lines, expected) in table {
            let found = answer(kind, lines.iter().map(|line| line.as_bytes()));
            let found = found.as_ref().map(|answer| (answer.record.as_str(), answer.text.as_str()));
            assert_eq!(found, expected, "{lines:?}");
        }
    }

    #[test]
    fn a_line_contains_the_submitted_text() {
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
