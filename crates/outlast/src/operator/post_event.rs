//! `outlast post-event`: sends the event on stdin to one address, for the notifications of a session. It follows no
//! redirect to another server, reads no body, and ends within a fixed time.

use std::{
    collections::BTreeMap,
    env,
    io::{self, Read},
    process::ExitCode,
    time::Duration,
};

use serde_json::Value;

use crate::{
    cli::report::{self, Report},
    gateway::http,
};

/// The variable with the address,
pub(crate) const URL: &str = "OUTLAST_NOTIFY_URL";
/// and the one with the form of the POST.
pub(crate) const FORM: &str = "OUTLAST_NOTIFY_FORM";
/// The form that ntfy expects; any other is JSON.
pub(crate) const NTFY: &str = "ntfy";
/// A longer event is not sent.
const EVENT_MAX: u64 = 1 << 20;
/// How long the connection may take,
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// and the whole request.
const POST_MAX: Duration = Duration::from_secs(20);
/// ntfy cuts longer messages.
const MESSAGE_MAX: usize = 3500;

pub(crate) fn post() -> Result<ExitCode, Report> {
    let failed = |why: &dyn std::fmt::Display| Report::new(report::FAILURE, format!("the event was not sent: {why}"));
    let url = env::var(URL).map_err(|_| failed(&"no address is set"))?;
    let mut event = Vec::new();
    let read = io::stdin().lock().take(EVENT_MAX + 1).read_to_end(&mut event).map_err(|error| failed(&error))?;
    if read as u64 > EVENT_MAX {
        return Err(failed(&"it is too long"));
    }
    let is_ntfy = env::var(FORM).is_ok_and(|form| form == NTFY);
    let (headers, body) = if is_ntfy {
        let event: Value = serde_json::from_slice(&event).map_err(|error| failed(&error))?;
        for_ntfy(&event)
    } else {
        (BTreeMap::from([("content-type".to_owned(), "application/json".to_owned())]), event)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| failed(&error))?;
    let posted = runtime.block_on(async {
        let posting = http::post(&url, &headers, body.into(), CONNECT_MAX);
        tokio::time::timeout(POST_MAX, posting).await.unwrap_or_else(|_| Err("it took too long".to_owned()))
    });
    match posted {
        Ok(status) if status.is_success() => Ok(ExitCode::SUCCESS),
        Ok(status) => Err(failed(&format!("the server answered with status {}", status.as_u16()))),
        Err(why) => Err(failed(&why)),
    }
}

/// The message, and its title, priority and tags in headers.
fn for_ntfy(event: &Value) -> (BTreeMap<String, String>, Vec<u8>) {
    let text = |member: &str| event[member].as_str().unwrap_or_default().to_owned();
    let (name, program) = (text("event"), text("program"));
    let (what, priority, tag) = match name.as_str() {
        "waiting_for_input" => (format!("{program} waits for input"), "default", "hourglass"),
        "limited" => {
            let until = event["until_text"].as_str().map_or(String::new(), |until| format!(" until {until}"));
            (format!("{program} has reached its usage limit{until}"), "default", "no_entry")
        }
        "crashed" => (format!("{program} ended ({})", text("exit")), "high", "warning"),
        "halted" => {
            (format!("{program} failed too often and is halted ({})", text("exit")), "urgent", "rotating_light")
        }
        "hung" => (format!("{program} hangs and is restarted"), "high", "warning"),
        "limit_continue_failed" => {
            (format!("{program} could not be told to continue after its limit"), "high", "warning")
        }
        "resume_failed" => (format!("{program} could not be made to continue: {}", text("why")), "high", "warning"),
        other => (format!("{program}: {other}"), "default", "information_source"),
    };
    let answer = text("answer");
    let mut body = if answer.is_empty() { what.clone() } else { format!("{what}\n\n{answer}") };
    let cut = (0..=MESSAGE_MAX.min(body.len())).rev().find(|at| body.is_char_boundary(*at)).unwrap_or(0);
    body.truncate(cut);
    let title = format!("outlast: {}", text("session"));
    let headers = [
        ("title", title.as_str()),
        ("priority", priority),
        ("tags", tag),
        ("content-type", "text/plain; charset=utf-8"),
    ];
    (headers.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(), body.into_bytes())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_event_is_a_message_for_people() {
        #[rustfmt::skip]
        let table = [
            (json!({"event": "waiting_for_input", "answer": "All tests pass."}),     "claude waits for input\n\nAll tests pass.",       "default"),
            (json!({"event": "limited", "until_text": "2026-11-18 03:37"}),          "claude has reached its usage limit until 2026-11-18 03:37", "default"),
            (json!({"event": "limited", "until_text": null}),                        "claude has reached its usage limit",            "default"),
            (json!({"event": "crashed", "exit": "signal 9 (SIGKILL)"}),              "claude ended (signal 9 (SIGKILL))",             "high"),
            (json!({"event": "halted", "exit": "exit code 1"}),                      "claude failed too often and is halted (exit code 1)", "urgent"),
            (json!({"event": "later"}),                                              "claude: later",                                 "default"),
        ];
        for (mut event, message, priority) in table {
            event["program"] = "claude".into();
            event["session"] = "night".into();
            let (headers, body) = for_ntfy(&event);
            assert_eq!(String::from_utf8(body).unwrap(), message);
            assert_eq!((headers["title"].as_str(), headers["priority"].as_str()), ("outlast: night", priority));
        }
        let (_, long) = for_ntfy(&json!({"event": "waiting_for_input", "answer": "é".repeat(4000)}));
        assert!(long.len() <= MESSAGE_MAX && String::from_utf8(long).is_ok());
    }
}
