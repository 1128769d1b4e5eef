//! The commands that only an agent's session understands: screen, send, wait-for.

use std::{
    io::{self, Read},
    process::ExitCode,
    time::Duration,
};

use outlast_core::send::{self, Failed, TEXT_MAX};

use serde_json::{Value, json};

use crate::{
    cli,
    control::{client::AskError, registry::Entry, wire::Refusal},
    instances::{ANSWER_MAX, ask, ask_plainly, failed, find, is_halted, pretty, print, print_json, resume_hint},
    report::{self, Report},
};

/// Once there is a place to type, the session needs no longer than this to know what came of it.
const ARRIVAL_MAX: Duration = Duration::from_secs(60);

pub fn screen(arguments: &cli::Screen) -> Result<ExitCode, Report> {
    let entry = find_session(arguments.which.id.as_deref())?;
    let answer = ask(&entry, "screen", json!({"history": arguments.history}), Some(ANSWER_MAX))?;
    if arguments.which.json {
        return print_json(&format!("{}\n", pretty(&answer)));
    }
    let history = answer["history"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut words: String = history.map(|line| format!("{line}\n")).collect();
    words.push_str(answer["text"].as_str().unwrap_or_default());
    print(&format!("{words}\n"))
}

pub fn send(arguments: &cli::Send) -> Result<ExitCode, Report> {
    let entry = find_session(Some(&arguments.id))?;
    let text = match &arguments.text {
        Some(text) => text.clone(),
        None => {
            let mut text = String::new();
            let read = io::stdin().lock().take(TEXT_MAX as u64 + 1).read_to_string(&mut text);
            read.map_err(|error| cannot_read_text(&error))?;
            // The last line's end is the shell's, not the text's.
            text.truncate(text.trim_end_matches('\n').len());
            text
        }
    };
    let timeout_ms = u64::try_from(arguments.timeout.as_millis()).unwrap_or(u64::MAX);
    let params = json!({"text": text, "submit": arguments.submit, "timeout_ms": timeout_ms, "key": arguments.key});
    let answer = ask_plainly(&entry, "send", params, Some(arguments.timeout.saturating_add(ARRIVAL_MAX)));
    let answer = match answer {
        Ok(answer) => answer,
        Err(AskError::Refused(refusal)) if arguments.json => {
            let error = json!({"code": refusal.code, "message": refusal.message, "screen": refusal.data["screen"],
                "removed": refusal.data["removed"]});
            print_json(&format!("{}\n", pretty(&json!({"error": error}))))?;
            return Ok(ExitCode::from(code_of(&refusal)));
        }
        Err(AskError::Refused(refusal)) => {
            let report = Report::new(code_of(&refusal), format!("the text did not reach `{}`", entry.id));
            let report = report.because(&refusal.message);
            // Line ends of any kind are no keys.
            if let Err(failed) = send::check(&text.replace('\r', "\n")) {
                return Err(report.hint(text_hint(&failed, &entry.id)));
            }
            return Err(match refusal.data["screen"].is_string() {
                true => report.hint(format!("`outlast screen {}` shows what is there", entry.id)),
                false if is_halted(&refusal) => report.hint(resume_hint(&entry.id)),
                false => report,
            });
        }
        Err(error) => return Err(failed(&entry, "send", &error)),
    };
    if arguments.json {
        return print_json(&format!("{}\n", pretty(&answer)));
    }
    let what = match (answer["result"].as_str(), answer["repeated"] == true) {
        (_, true) => "Had sent it before to",
        (Some("submitted"), false) => "Sent to",
        (Some("unproven"), false) => "Entered, without proof, into",
        (_, false) => "Typed into",
    };
    print(&format!("{what} {}: {} bytes in {} ms\n", entry.id, text.len(), answer["took_ms"]))
}

/// A text that nobody could be sent is a mistake of who sends it.
fn code_of(refusal: &Refusal) -> u8 {
    if refusal.code == "bad_request" { report::USAGE } else { report::FAILURE }
}

fn text_hint(failed: &Failed, id: &str) -> String {
    match failed {
        Failed::Empty => format!("put it behind the id, `outlast send {id} TEXT`, or on stdin"),
        Failed::Control(_) => format!("a text is letters; `outlast inject {id}` types keys and any other bytes"),
        _ => "put it into a file, and send the file's name".to_owned(),
    }
}

fn cannot_read_text(error: &io::Error) -> Report {
    let report = Report::new(report::FAILURE, "cannot read the text from stdin").because(error);
    match error.kind() {
        io::ErrorKind::InvalidData => report.hint("a text is UTF-8; `outlast inject` types any bytes"),
        _ => report,
    }
}

pub fn wait_for(arguments: &cli::WaitFor) -> Result<ExitCode, Report> {
    let entry = find_session(arguments.which.id.as_deref())?;
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    let mut params = json!({"timeout": seconds(arguments.timeout)});
    match (&arguments.text, arguments.quiet) {
        (Some(text), _) => params["text"] = text.as_str().into(),
        (None, Some(quiet)) => params["quiet"] = quiet.as_secs_f64().into(),
        (None, None) => params["prompt"] = true.into(),
    }
    // It keeps the time itself, so there is no end to our patience.
    let answer = ask_plainly(&entry, "wait_for", params, None);
    match answer {
        Ok(answer) if arguments.which.json => print_json(&format!("{answer}\n")),
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(AskError::Refused(refusal)) if refusal.code == "timed_out" => {
            if arguments.which.json {
                print_json(&format!("{}\n", json!({"met": false, "timed_out": true})))?;
                return Ok(ExitCode::from(report::TIMED_OUT));
            }
            let wish = match (&arguments.text, arguments.quiet) {
                (Some(text), _) => format!("`{}` did not show `{text}`", entry.id),
                (None, Some(_)) => format!("`{}` was not quiet", entry.id),
                (None, None) => format!("`{}` did not wait for input", entry.id),
            };
            let time = arguments.timeout.unwrap_or_default().as_secs_f64();
            // To wait for quiet takes no screen, so there may be none to print.
            let hint = match arguments.quiet {
                None => format!("`outlast screen {}` prints what it shows", entry.id),
                Some(_) => format!("`outlast logs {}` shows what it did", entry.id),
            };
            Err(Report::new(report::TIMED_OUT, format!("{wish} within {time} s")).hint(hint))
        }
        Err(error) => Err(failed(&entry, "wait", &error)),
    }
}

/// The one that is meant, if it is an agent's.
pub fn find_session(wanted: Option<&str>) -> Result<Entry, Report> {
    let entry = find(wanted)?;
    if entry.kind != "session" {
        let what = if entry.kind == "gateway" { "gateway" } else { "server" };
        return Err(Report::new(report::USAGE, format!("`{}` is a {what} and has no terminal", entry.id))
            .hint("only agents under `outlast run` have one"));
    }
    Ok(entry)
}
