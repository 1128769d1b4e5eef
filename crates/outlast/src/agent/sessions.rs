//! The commands that only sessions have: screen, send, wait-for.

use std::{
    io::{self, Read},
    process::ExitCode,
    time::Duration,
};

use outlast_core::send::{self, Failed, TEXT_MAX};

use outlast_control::{
    answer::{RefusalData, ScreenText, Sent, Waited},
    client::AskError,
    find::{ANSWER_MAX, find},
    method::{Method, Screen, Send, WaitFor},
    registry::Entry,
    wire::Refusal,
};
use serde_json::json;

use crate::{
    cli::{
        self,
        report::{self, Report},
    },
    operator::instances::{ask, ask_plainly, failed, is_halted, pretty, print, print_json, resume_hint},
};

/// Once the composer is ready, the session answers within this time.
const ARRIVAL_MAX: Duration = Duration::from_secs(60);

pub(crate) fn screen(arguments: &cli::Screen) -> Result<ExitCode, Report> {
    let entry = find_session(arguments.which.id.as_deref())?;
    let history = u64::try_from(arguments.history).unwrap_or(u64::MAX);
    let answer = ask(&entry, &Method::Screen(Screen { history }), Some(ANSWER_MAX))?;
    if arguments.which.json {
        return print_json(&format!("{}\n", pretty(&answer)));
    }
    let ScreenText { history, text } = ScreenText::read(&answer);
    let history: String = history.iter().map(|line| format!("{line}\n")).collect();
    print(&format!("{history}{text}\n"))
}

pub(crate) fn send(arguments: &cli::Send) -> Result<ExitCode, Report> {
    let entry = find_session(Some(&arguments.id))?;
    let text = match &arguments.text {
        Some(text) => text.clone(),
        None => {
            let mut text = String::new();
            let read = io::stdin().lock().take(TEXT_MAX as u64 + 1).read_to_string(&mut text);
            read.map_err(|error| cannot_read_text(&error))?;
            // The last line end is the shell's, not part of the text.
            text.truncate(text.trim_end_matches('\n').len());
            text
        }
    };
    let timeout_ms = u64::try_from(arguments.timeout.as_millis()).unwrap_or(u64::MAX);
    let send = Method::Send(Send {
        text: text.clone(),
        submit: Some(arguments.submit),
        timeout_ms: Some(timeout_ms),
        key: arguments.key.clone(),
    });
    let answer = ask_plainly(&entry, &send, Some(arguments.timeout.saturating_add(ARRIVAL_MAX)));
    let answer = match answer {
        Ok(answer) => answer,
        Err(AskError::Refused(refusal)) if arguments.json => {
            let RefusalData { screen, removed, .. } = RefusalData::read(&refusal.data);
            let error = json!({"code": refusal.code, "message": refusal.message, "screen": screen, "removed": removed});
            print_json(&format!("{}\n", pretty(&json!({"error": error}))))?;
            return Ok(ExitCode::from(code_of(&refusal)));
        }
        Err(AskError::Refused(refusal)) => {
            let report = Report::new(code_of(&refusal), format!("the text did not reach `{}`", entry.id));
            let report = report.because(&refusal.message);
            // Line ends of any kind are no control keys.
            if let Err(failed) = send::check(&text.replace('\r', "\n")) {
                return Err(report.hint(text_hint(&failed, &entry.id)));
            }
            return Err(match RefusalData::read(&refusal.data).screen.is_some() {
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
    let Sent { result, repeated, took_ms } = Sent::read(&answer);
    let what = match (result.as_str(), repeated) {
        (_, true) => "Already sent to",
        ("submitted", false) => "Sent to",
        ("unproven", false) => "Entered, without proof, into",
        (_, false) => "Typed into",
    };
    print(&format!("{what} {}: {} bytes in {took_ms} ms\n", entry.id, text.len()))
}

/// A text that no agent can be sent is a usage error.
fn code_of(refusal: &Refusal) -> u8 {
    if refusal.code == "bad_request" { report::USAGE } else { report::FAILURE }
}

fn text_hint(failed: &Failed, id: &str) -> String {
    match failed {
        Failed::Empty => format!("give the text after the id, `outlast send {id} TEXT`, or on stdin"),
        Failed::Control(_) => format!("`outlast inject {id}` types keys and any other bytes"),
        _ => "put the text into a file, and send the file's name".to_owned(),
    }
}

fn cannot_read_text(error: &io::Error) -> Report {
    let report = Report::new(report::FAILURE, "cannot read the text from stdin").because(error);
    match error.kind() {
        io::ErrorKind::InvalidData => report.hint("the text must be UTF-8; `outlast inject` types any bytes"),
        _ => report,
    }
}

pub(crate) fn wait_for(arguments: &cli::WaitFor) -> Result<ExitCode, Report> {
    let entry = find_session(arguments.which.id.as_deref())?;
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    let timeout = seconds(arguments.timeout);
    let wanted = match (&arguments.text, arguments.quiet) {
        (Some(text), _) => WaitFor { text: Some(text.clone()), timeout, ..WaitFor::default() },
        (None, quiet @ Some(_)) => WaitFor { quiet: seconds(quiet), timeout, ..WaitFor::default() },
        (None, None) if arguments.turn => WaitFor { turn: Some(true), timeout, ..WaitFor::default() },
        (None, None) => WaitFor { prompt: Some(true), timeout, ..WaitFor::default() },
    };
    // The session keeps the time, so this command has no timeout.
    let answer = ask_plainly(&entry, &Method::WaitFor(wanted), None);
    match answer {
        Ok(answer) if arguments.which.json => print_json(&format!("{answer}\n")),
        Ok(answer) if arguments.turn => match Waited::read(&answer).answer {
            Some(text) => print(&format!("{text}\n")),
            None => Ok(ExitCode::SUCCESS),
        },
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(AskError::Refused(refusal)) if refusal.code == "timed_out" => {
            if arguments.which.json {
                print_json(&format!("{}\n", json!({"met": false, "timed_out": true})))?;
                return Ok(ExitCode::from(report::TIMED_OUT));
            }
            let wish = match (&arguments.text, arguments.quiet) {
                (Some(text), _) => format!("`{}` did not show `{text}`", entry.id),
                (None, Some(_)) => format!("`{}` was not silent", entry.id),
                (None, None) if arguments.turn => format!("`{}` did not finish its turn", entry.id),
                (None, None) => format!("`{}` did not wait for input", entry.id),
            };
            let time = arguments.timeout.unwrap_or_default().as_secs_f64();
            // Waiting for quiet needs no screen, so there may be none to print.
            let hint = match arguments.quiet {
                None => format!("`outlast screen {}` prints its screen", entry.id),
                Some(_) => format!("`outlast logs {}` shows what it did", entry.id),
            };
            Err(Report::new(report::TIMED_OUT, format!("{wish} within {time} s")).hint(hint))
        }
        Err(error) => Err(failed(&entry, "wait", &error)),
    }
}

/// The instance that is meant, if it is a session.
pub(crate) fn find_session(wanted: Option<&str>) -> Result<Entry, Report> {
    let entry = find(wanted)?;
    if entry.kind != "session" {
        let what = if entry.kind == "gateway" { "gateway" } else { "server" };
        return Err(Report::new(report::USAGE, format!("`{}` is a {what} and has no terminal", entry.id))
            .hint("only agents of `outlast run` have a terminal"));
    }
    Ok(entry)
}
