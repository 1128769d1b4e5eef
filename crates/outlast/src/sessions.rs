//! The commands that only an agent's session understands: screen.

use std::process::ExitCode;

use serde_json::{Value, json};

use crate::{
    cli,
    control::registry::Entry,
    instances::{ANSWER_MAX, ask, find, pretty, print},
    report::{self, Report},
};

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

/// The one that is meant, if it is an agent's.
fn find_session(wanted: Option<&str>) -> Result<Entry, Report> {
    let entry = find(wanted)?;
    if entry.kind != "session" {
        return Err(Report::new(report::USAGE, format!("`{}` is a server and has no terminal", entry.id))
            .hint("only agents under `outlast run` have one"));
    }
    Ok(entry)
}
