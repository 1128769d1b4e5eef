//! `outlast restore`: starts interrupted sessions again, one after the other, each with its options, its directory and its
//! conversation. Which ones, and in which order, is decided in core (`restore`).

use std::{
    env,
    io::Write,
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use outlast_control::{
    client::{self, AskError},
    find::{SURVEY_MAX, registry},
    method::{Method, WaitFor},
};
use outlast_core::{
    redact,
    restore::{self, Candidate, Refused, Selection},
    visible,
};
use serde_json::{Value, json};

use crate::{
    agent::session_record::{Records, SessionRecord, State},
    cli::{
        self,
        report::{self, Report, shell_quote},
        table::{self, Column, Yield},
    },
    operator::instances::{ask_plainly, from_home, pretty, print, print_json},
};

/// How long the next session waits until a restored agent waits for input. After this time the next one is started.
const READY_MAX: Duration = Duration::from_secs(60);
/// How long the answer may take beyond that.
const ANSWER_LATE_MAX: Duration = Duration::from_secs(10);
/// The most names of variables in one line.
const NAMED_MAX: usize = 16;

/// What became of one session.
enum RestoreOutcome {
    /// Its agent waits for input, or at least runs.
    Restored {
        is_ready: bool,
        missing: Vec<String>,
    },
    AlreadyRunning,
    Failed(Report),
}

pub(crate) fn restore(arguments: &cli::Restore) -> Result<ExitCode, Report> {
    let home = env::home_dir().filter(|home| home.is_absolute()).ok_or_else(|| {
        Report::new(report::FAILURE, "there is no home directory, so no session records can be found").hint("set HOME")
    })?;
    let (records, unusable) = Records::of(&home).all();
    let running: Vec<String> = client::survey(&registry()?, SURVEY_MAX)
        .into_iter()
        // One that does not answer has been killed, or keeps its name; then it is reported.
        .filter(|found| found.entry.kind == "session" && found.state.is_some())
        .map(|found| found.entry.id)
        .collect();
    let candidate = |record: &SessionRecord| Candidate {
        id: record.id.clone(),
        has_ended: record.state == State::Ended,
        is_running: running.contains(&record.id),
        updated: record.updated,
    };
    let candidates: Vec<Candidate> = records.iter().map(candidate).collect();
    let selection = arguments.id.as_deref().map_or(Selection::All, Selection::One);
    let unusable: Vec<(String, Report)> = unusable
        .iter()
        .map(|(path, error)| (id_of(path), unusable_record(path, error)))
        .filter(|(id, _)| matches!(selection, Selection::All) || selection == Selection::One(id))
        .collect();
    let plan = match (restore::plan(&candidates, selection), selection) {
        (Ok(plan), _) => plan,
        (Err(Refused::Unknown), _) if !unusable.is_empty() => restore::Plan::default(),
        (Err(refused), Selection::One(id)) => return Err(refusal(id, refused, &candidates)),
        (Err(_), Selection::All) => restore::Plan::default(),
    };
    let of = |id: &String| records.iter().find(|record| record.id == *id);
    if arguments.list {
        let listed: Vec<&SessionRecord> = plan.start.iter().filter_map(of).collect();
        return list(&listed, arguments.json, unusable);
    }
    let mut outcomes: Vec<(String, RestoreOutcome)> =
        plan.running.into_iter().map(|id| (id, RestoreOutcome::AlreadyRunning)).collect();
    for record in plan.start.iter().filter_map(of) {
        let outcome = start(record).unwrap_or_else(RestoreOutcome::Failed);
        if !arguments.json {
            say(record, &outcome)?;
        }
        outcomes.push((record.id.clone(), outcome));
    }
    outcomes.extend(unusable.into_iter().map(|(id, report)| (id, RestoreOutcome::Failed(report))));
    let is_failed = outcomes.iter().any(|(_, outcome)| matches!(outcome, RestoreOutcome::Failed(_)));
    if arguments.json {
        let all: Vec<Value> = outcomes.iter().map(|(id, outcome)| in_json(id, outcome)).collect();
        print_json(&format!("{}\n", pretty(&all.into())))?;
    } else {
        for (_, outcome) in outcomes.iter().filter(|(id, _)| of(id).is_none()) {
            reported(outcome);
        }
        if !is_failed && !outcomes.iter().any(|(_, outcome)| matches!(outcome, RestoreOutcome::Restored { .. })) {
            print("There is nothing to restore.\n")?;
        }
    }
    Ok(if is_failed { ExitCode::from(report::FAILURE) } else { ExitCode::SUCCESS })
}

/// Starts one session in the background, and waits until its agent waits for input.
fn start(record: &SessionRecord) -> Result<RestoreOutcome, Report> {
    let failed = || Report::new(report::FAILURE, format!("the session `{}` was not restored", record.id));
    let again = || format!("`outlast restore {}` tries it again", record.id);
    if !record.here.is_dir() {
        let because = format!("the directory it was started in is gone: {}", record.here.display());
        return Err(failed().because(because).hint(format!("create it, and {}", again())));
    }
    let program = env::current_exe().map_err(|error| failed().because(error))?;
    let mut command = Command::new(program);
    command.args(["run", "--detach", "--restored", "--session", &record.id]).args(&record.options);
    command.arg("--").args(&record.command).current_dir(&record.here).stdin(Stdio::null());
    let output = command.output().map_err(|error| failed().because(error))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said: Vec<&str> = said.lines().filter(|line| !line.starts_with("[outlast] ")).collect();
        let line = |label: &str| said.iter().find_map(|line| line.trim_start().strip_prefix(label));
        let because = [line("error: "), line("because: ")].into_iter().flatten().collect::<Vec<_>>().join(": ");
        let because = if because.is_empty() { output.status.to_string() } else { because };
        let hint = [line("hint: ").map(str::to_owned), Some(again())].into_iter().flatten().collect::<Vec<_>>();
        return Err(failed().because(because).hint(hint.join("; then ")));
    }
    let missing = record.env.iter().filter(|name| env::var_os(name).is_none()).cloned().collect();
    let is_ready = match until_ready(&record.id) {
        Ok(is_ready) => is_ready,
        Err(because) => {
            let hint = format!("`outlast logs {}` shows what it did; {}", record.id, again());
            return Err(failed().because(because).hint(hint));
        }
    };
    Ok(RestoreOutcome::Restored { is_ready, missing })
}

/// True if the agent waits for input; false if it runs and does not wait yet, or if it cannot be seen.
fn until_ready(id: &str) -> Result<bool, String> {
    let entry = registry().ok().and_then(|registry| registry.read().into_iter().find(|entry| entry.id == id));
    let Some(entry) = entry else { return Err("it ended at once".to_owned()) };
    let wanted = WaitFor { prompt: Some(true), timeout: Some(READY_MAX.as_secs_f64()), ..WaitFor::default() };
    match ask_plainly(&entry, &Method::WaitFor(wanted), Some(READY_MAX + ANSWER_LATE_MAX)) {
        Ok(_) => Ok(true),
        Err(AskError::Refused(refusal)) if refusal.code == "halted" => Err(refusal.message),
        Err(AskError::Refused(_) | AskError::TooLate) => Ok(false),
        Err(error) => Err(error.to_string()),
    }
}

fn say(record: &SessionRecord, outcome: &RestoreOutcome) -> Result<(), Report> {
    if let Some(words) = reported(outcome) {
        let home = env::home_dir();
        let place = from_home(&record.cwd, home.as_deref());
        print(&format!("{}: {words} ({} in {place})\n", record.id, record.agent))?;
    }
    if let RestoreOutcome::Restored { missing, .. } = outcome
        && !missing.is_empty()
    {
        let named = missing.iter().take(NAMED_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = missing.len().saturating_sub(NAMED_MAX);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let line = format!(
            "[outlast] {}: variables that its agent had before and that are not set here: {named}{more}",
            record.id
        );
        // stderr may be closed; the session was restored all the same.
        let _ = writeln!(std::io::stderr().lock(), "{}", visible::text(&line));
    }
    Ok(())
}

/// The words for stdout; a failure is printed to stderr at once.
fn reported(outcome: &RestoreOutcome) -> Option<&'static str> {
    match outcome {
        RestoreOutcome::Restored { is_ready: true, .. } => Some("restored"),
        RestoreOutcome::Restored { is_ready: false, .. } => Some("started, and does not wait for input yet"),
        RestoreOutcome::AlreadyRunning => None,
        RestoreOutcome::Failed(report) => {
            report.print();
            None
        }
    }
}

fn in_json(id: &str, outcome: &RestoreOutcome) -> Value {
    match outcome {
        RestoreOutcome::Restored { is_ready, missing } => {
            json!({"id": id, "result": "restored", "waiting_for_input": is_ready, "env_missing": missing})
        }
        RestoreOutcome::AlreadyRunning => json!({"id": id, "result": "running"}),
        RestoreOutcome::Failed(report) => json!({"id": id, "result": "failed", "error": report.to_json()}),
    }
}

fn list(records: &[&SessionRecord], as_json: bool, unusable: Vec<(String, Report)>) -> Result<ExitCode, Report> {
    let command = |record: &SessionRecord| shell_quote(redact::command(&record.command).iter().map(String::as_str));
    let code = if unusable.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(report::FAILURE) };
    if as_json {
        let one = |record: &&SessionRecord| {
            json!({
                "id": record.id, "agent": record.agent, "command": command(record), "cwd": record.cwd.to_string_lossy(),
                "conversation": record.conversation, "options": record.options, "env": record.env, "updated": record.updated,
            })
        };
        let broken = unusable.iter().map(|(id, report)| json!({"id": id, "error": report.to_json()}));
        let all: Vec<Value> = records.iter().map(one).chain(broken).collect();
        print_json(&format!("{}\n", pretty(&all.into())))?;
        return Ok(code);
    }
    for (_, report) in &unusable {
        report.print();
    }
    if records.is_empty() {
        print("There is nothing to restore.\n")?;
        return Ok(code);
    }
    let column = |title, yields| Column { title, is_number: false, yields };
    let columns = [
        column("ID", Yield::Last(12)),
        column("AGENT", Yield::Soon(1)),
        column("CWD", Yield::Beginning(16, 8)),
        column("COMMAND", Yield::End(16, 8)),
    ];
    let home = env::home_dir();
    let row = |record: &&SessionRecord| {
        vec![record.id.clone(), record.agent.clone(), from_home(&record.cwd, home.as_deref()), command(record)]
    };
    let rows: Vec<Vec<String>> = records.iter().map(row).collect();
    let lines = table::lines(&columns, &rows, table::room());
    print(&lines.into_iter().map(|line| line + "\n").collect::<String>())?;
    Ok(code)
}

fn refusal(id: &str, refused: Refused, candidates: &[Candidate]) -> Report {
    let report = Report::new(report::FAILURE, format!("the session `{id}` cannot be restored")).because(refused);
    match refused {
        Refused::IsRunning => report.hint(format!("`outlast attach {id}` shows it")),
        Refused::HasEnded => report.hint(format!("`outlast run --session {id} -- CMD` begins a new one")),
        Refused::Unknown => {
            let known = candidates.iter().filter(|one| !one.has_ended && !one.is_running).map(|one| one.id.as_str());
            let known: Vec<&str> = known.take(NAMED_MAX).collect();
            report.hint(match known.is_empty() {
                true => "there is no session to restore".to_owned(),
                false => format!("those that can be restored: {}", known.join(", ")),
            })
        }
    }
}

fn unusable_record(path: &Path, error: &std::io::Error) -> Report {
    Report::new(report::FAILURE, format!("the session record {} cannot be used", path.display()))
        .because(error)
        .hint("the agent's own option continues its conversation, for example `claude --resume`; then remove the file")
}

fn id_of(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}
