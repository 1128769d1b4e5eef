//! The commands that only an agent's session understands: screen, wait-for.

use std::{process::ExitCode, time::Duration};

use serde_json::{Value, json};

use crate::{
    cli,
    control::{client::AskError, registry::Entry},
    instances::{ANSWER_MAX, ask, ask_plainly, failed, find, pretty, print},
    report::{self, Report},
};

/// The exit code of who waited in vain, as that of timeout(1).
const TIMED_OUT: u8 = 124;

pub fn screen(arguments: &cli::Screen) -> Result<ExitCode, Report> {
    let entry = find_session(arguments.which.id.as_deref())?;
    let answer = ask(&entry, "screen", json!({"history": arguments.history}), Some(ANSWER_MAX))?;
    if arguments.which.json {
        return print(&format!("{}\n", pretty(&answer)));
    }
    let history = answer["history"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let mut words: String = history.map(|line| format!("{line}\n")).collect();
    words.push_str(answer["text"].as_str().unwrap_or_default());
    print(&format!("{words}\n"))
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
        Ok(answer) if arguments.which.json => print(&format!("{answer}\n")),
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(AskError::Refused(refusal)) if refusal.code == "timed_out" => {
            if arguments.which.json {
                print(&format!("{}\n", json!({"met": false, "timed_out": true})))?;
                return Ok(ExitCode::from(TIMED_OUT));
            }
            let wish = match (&arguments.text, arguments.quiet) {
                (Some(text), _) => format!("`{}` did not show `{text}`", entry.id),
                (None, Some(_)) => format!("`{}` was not quiet", entry.id),
                (None, None) => format!("`{}` did not wait for input", entry.id),
            };
            let time = arguments.timeout.unwrap_or_default().as_secs_f64();
            Err(Report::new(TIMED_OUT, format!("{wish} within {time} s"))
                .hint(format!("`outlast screen {}` prints what it shows", entry.id)))
        }
        Err(error) => Err(failed(&entry, "wait", &error)),
    }
}

/// The one that is meant, if it is an agent's.
pub fn find_session(wanted: Option<&str>) -> Result<Entry, Report> {
    let entry = find(wanted)?;
    if entry.kind != "session" {
        return Err(Report::new(report::USAGE, format!("`{}` is a server and has no terminal", entry.id))
            .hint("only agents under `outlast run` have one"));
    }
    Ok(entry)
}
