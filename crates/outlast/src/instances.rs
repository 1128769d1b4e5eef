//! The commands that speak to what runs: ps, state, pid, restart, stop, resume.

use std::{
    env,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    cli,
    control::{
        client::{self, AskError, Client, Found},
        registry::{Entry, Registry},
        wire::Refusal,
    },
    report::{self, Report, one_of, slips},
    table::{self, Column, Yield},
};

/// How long `ps` waits for all answers together; who has not answered by then is called unresponsive.
const SURVEY_MAX: Duration = Duration::from_millis(500);
/// How long one instance may take for an answer that it has at hand.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// How much of a server's stderr stands in an error; the rest is in the log.
const STDERR_LINES_MAX: usize = 20;

pub fn ps(arguments: &cli::Ps) -> Result<ExitCode, Report> {
    let found = client::survey(&registry()?, SURVEY_MAX);
    if arguments.json {
        let rows: Vec<Value> = found.iter().map(row_in_json).collect();
        return print(&format!("{}\n", pretty(&Value::Array(rows))));
    }
    let width = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
    print(&ps_in_words(&found, env::home_dir().as_deref(), width))
}

pub fn state(which: &cli::Which) -> Result<ExitCode, Report> {
    let entry = find(which.id.as_deref())?;
    let state = ask(&entry, "state", json!({}), Some(ANSWER_MAX))?;
    if which.json {
        return print(&format!("{}\n", pretty(&state)));
    }
    print(&state_in_words(&state))
}

pub fn pid(which: &cli::Which) -> Result<ExitCode, Report> {
    let entry = find(which.id.as_deref())?;
    let answer = ask(&entry, "pid", json!({}), Some(ANSWER_MAX))?;
    if which.json {
        return print(&format!("{answer}\n"));
    }
    match answer["pid"].as_u64() {
        Some(pid) => print(&format!("{pid}\n")),
        None => Err(Report::new(report::FAILURE, format!("`{}` has no process just now", entry.id))
            .hint(format!("`outlast state {}` says why", entry.id))),
    }
}

pub fn restart(arguments: &cli::Restart) -> Result<ExitCode, Report> {
    let entry = find(arguments.which.id.as_deref())?;
    let reason = arguments.reason.as_deref().unwrap_or("asked for on the command line");
    // As long as it takes: a build and a handshake have limits of their own, and whoever waits can stop waiting.
    let result = ask_plainly(&entry, "restart", json!({"reason": reason}), None);
    say_restarted(&entry, "restart", result, arguments.which.json)
}

pub fn resume(which: &cli::Which) -> Result<ExitCode, Report> {
    let entry = find(which.id.as_deref())?;
    let result = ask_plainly(&entry, "resume", json!({}), None);
    match result {
        Ok(report) if report["resumed"] == false && !which.json => {
            let state = report["state"].as_str().unwrap_or("running");
            print(&format!("Nothing to resume: {} is {state}\n", entry.id))
        }
        result => say_restarted(&entry, "resume", result, which.json),
    }
}

pub fn stop(arguments: &cli::Stop) -> Result<ExitCode, Report> {
    let entry = find(arguments.which.id.as_deref())?;
    let since = Instant::now();
    let stopped = connect(&entry).and_then(|mut client| {
        client.ask("stop", json!({"graceful": !arguments.force}), Some(since + ANSWER_MAX))?;
        client.wait_for_end()
    });
    stopped.map_err(|error| failed(&entry, "stop", &error))?;
    let took_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
    if arguments.which.json {
        return print(&format!("{}\n", json!({"id": entry.id, "stopped": true, "took_ms": took_ms})));
    }
    print(&format!("Stopped {} (pid {}) in {took_ms} ms\n", entry.id, entry.pid))
}

// ---- finding one ---------------------------------------------------------------------------------------------

pub fn registry() -> Result<Registry, Report> {
    match env::home_dir().filter(|home| home.is_absolute()) {
        Some(home) => Ok(Registry::of(&home)),
        None => Err(Report::new(report::FAILURE, "there is no home directory, so nothing is known of what runs")
            .hint("set HOME")),
    }
}

/// The one instance that is meant, among those that live.
pub fn find(wanted: Option<&str>) -> Result<Entry, Report> {
    let registry = registry()?;
    let mut entries = registry.read();
    let cwd = env::current_dir().unwrap_or_default();
    // Only who is meant is looked at closely, so that one that hangs does not delay the others.
    loop {
        let entry = choose(wanted, &entries, &cwd)?;
        if Client::connect(&entry.socket, ANSWER_MAX).is_ok() || !client::is_gone(&registry, entry) {
            return Ok(entry.clone());
        }
        let id = entry.id.clone();
        entries.retain(|entry| entry.id != id);
    }
}

/// By id, by name, by the beginning of an id; without any, the only one in this directory.
pub fn choose<'a>(wanted: Option<&str>, entries: &'a [Entry], cwd: &Path) -> Result<&'a Entry, Report> {
    let Some(wanted) = wanted else {
        let here: Vec<&Entry> = entries.iter().filter(|entry| entry.cwd == cwd).collect();
        return match here[..] {
            [only] => Ok(only),
            [] => Err(Report::new(report::FAILURE, "nothing runs under outlast in this directory")
                .hint(what_there_is(entries))),
            _ => Err(Report::new(
                report::FAILURE,
                format!("{} instances run in this directory: {}", here.len(), names_of(&here, "and")),
            )
            .hint("say which")),
        };
    };
    let by = |test: &dyn Fn(&Entry) -> bool| entries.iter().filter(|entry| test(entry)).collect::<Vec<_>>();
    let found = [by(&|entry| entry.id == wanted), by(&|entry| entry.name == wanted), by(&|entry| entry.id.starts_with(wanted))];
    match found.into_iter().find(|found| !found.is_empty()).as_deref() {
        Some([only]) => Ok(only),
        Some(several) => Err(Report::new(report::FAILURE, format!("`{wanted}` may be {}", names_of(several, "or")))
            .hint("give more of the id")),
        None => Err(Report::new(report::FAILURE, format!("nothing called `{wanted}` runs under outlast"))
            .hint(closest(wanted, entries).unwrap_or_else(|| what_there_is(entries)))),
    }
}

fn closest(wanted: &str, entries: &[Entry]) -> Option<String> {
    let names = entries.iter().flat_map(|entry| [entry.id.as_str(), entry.name.as_str()]);
    let near = names.map(|name| (slips(wanted, name), name)).filter(|(slips, name)| *slips <= name.len() / 3);
    near.min().map(|(_, name)| format!("did you mean `{name}`?"))
}

fn what_there_is(entries: &[Entry]) -> String {
    match entries.len() {
        0 => "nothing else runs either; `outlast mcp -- CMD` starts something".to_owned(),
        1 => format!("`{}` runs in {}", entries[0].id, entries[0].cwd.display()),
        count => format!("`outlast ps` shows all {count} that run elsewhere"),
    }
}

fn names_of(entries: &[&Entry], last: &str) -> String {
    let ids: Vec<String> = entries.iter().map(|entry| entry.id.clone()).collect();
    one_of(&ids, last)
}

// ---- asking --------------------------------------------------------------------------------------------------

fn connect(entry: &Entry) -> Result<Client, AskError> {
    Ok(Client::connect(&entry.socket, ANSWER_MAX)?)
}

fn ask_plainly(entry: &Entry, method: &str, params: Value, patience: Option<Duration>) -> Result<Value, AskError> {
    connect(entry)?.ask(method, params, patience.map(|patience| Instant::now() + patience))
}

fn ask(entry: &Entry, method: &str, params: Value, patience: Option<Duration>) -> Result<Value, Report> {
    ask_plainly(entry, method, params, patience).map_err(|error| failed(entry, method, &error))
}

fn failed(entry: &Entry, method: &str, error: &AskError) -> Report {
    let id = &entry.id;
    let report = match method {
        "state" | "pid" => Report::new(report::FAILURE, format!("`{id}` does not say how it is")),
        method => Report::new(report::FAILURE, format!("the {method} of `{id}` failed")),
    };
    match error {
        AskError::TooLate => report
            .because(error)
            .hint(format!("outlast itself hangs; its process is {}, and ending that ends its server too", entry.pid)),
        AskError::Refused(Refusal { message, data, .. }) => report.because(with_stderr(message, data)),
        error => report.because(error),
    }
}

/// What a restart said when it failed, and the end of what the server had to say.
fn with_stderr(message: &str, data: &Value) -> String {
    let message = message.strip_prefix("The restart failed: ").unwrap_or(message);
    let lines: Vec<&str> = data["stderr_tail"].as_str().unwrap_or_default().lines().collect();
    if lines.is_empty() {
        return message.to_owned();
    }
    let skipped = lines.len().saturating_sub(STDERR_LINES_MAX);
    let more = if skipped > 0 { format!("\n  … {skipped} lines before, in the log …") } else { String::new() };
    format!("{message}\nits stderr:{more}\n  {}", lines[skipped..].join("\n  "))
}

// ---- words ---------------------------------------------------------------------------------------------------

fn say_restarted(
    entry: &Entry,
    method: &str,
    result: Result<Value, AskError>,
    in_json: bool,
) -> Result<ExitCode, Report> {
    match result {
        Ok(report) if in_json => print(&format!("{}\n", pretty(&report))),
        Ok(report) => print(&restarted_in_words(&entry.id, &report)),
        Err(AskError::Refused(refusal)) if in_json => {
            let mut error = json!({"code": refusal.code, "message": refusal.message});
            if let (Some(error), Some(data)) = (error.as_object_mut(), refusal.data.as_object()) {
                error.extend(data.clone());
            }
            print(&format!("{}\n", pretty(&json!({"error": error}))))?;
            Ok(ExitCode::from(report::FAILURE))
        }
        Err(error) => Err(failed(entry, method, &error)),
    }
}

fn restarted_in_words(id: &str, report: &Value) -> String {
    let new = &report["new_pid"];
    let pids = match report["old_pid"].as_u64() {
        Some(old) => format!("pid {old} → {new}"),
        None => format!("pid {new}"),
    };
    let mut words = format!("Restarted {id} in {} ms: {pids}\n", report["took_ms"]);
    let tools = &report["tools"];
    if tools["compared"] == false {
        return words;
    }
    let mut is_same = true;
    for what in ["added", "removed", "changed"] {
        let names: Vec<&str> = tools[what].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if !names.is_empty() {
            is_same = false;
            words.push_str(&format!("  tools {:8} {}\n", format!("{what}:"), names.join(", ")));
        }
    }
    if is_same {
        words.push_str("  its tools are the same\n");
    }
    if let Some(draining) = report["draining"].as_str() {
        words.push_str(&format!("  {draining}\n"));
    }
    words
}

/// One instance in `ps --json`.
fn row_in_json(found: &Found) -> Value {
    let about = found.entry.to_json();
    let unanswered = json!({"state": "unresponsive"});
    let state = found.state.as_ref().unwrap_or(&unanswered);
    let mut row = json!({
        "state": state["state"],
        "pid": found.entry.pid,
        "child_pid": state["pid"],
        "uptime_s": state["uptime_s"],
        "restarts": state["restarts"],
        "crashes": state["crashes"],
        "next_try_s": state["next_try_s"],
        "last_exit": state["last_exit"],
        "generation": state["generation"],
    });
    for member in ["id", "kind", "name", "cwd", "socket", "started", "command", "log", "audit"] {
        row[member] = about[member].clone();
    }
    row
}

fn ps_in_words(found: &[Found], home: Option<&Path>, width: Option<usize>) -> String {
    if found.is_empty() {
        return "Nothing runs under outlast.\n".to_owned();
    }
    let column = |title, is_number, yields| Column { title, is_number, yields };
    let columns = [
        column("ID", false, Yield::Never),
        column("KIND", false, Yield::Whole(4)),
        column("STATE", false, Yield::Never),
        column("PID", true, Yield::Whole(3)),
        column("CHILD", true, Yield::Never),
        column("UPTIME", true, Yield::Never),
        column("RESTARTS", true, Yield::Whole(1)),
        column("NEXT", true, Yield::Whole(2)),
        column("LAST-EXIT", false, Yield::End(12)),
        column("CWD", false, Yield::Beginning(16)),
    ];
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|found| {
            let row = row_in_json(found);
            let number = |member: &str| row[member].as_u64().map_or_else(|| "-".to_owned(), |number| number.to_string());
            let time = |member: &str| row[member].as_f64().map_or_else(|| "-".to_owned(), in_short);
            let text = |member: &str| row[member].as_str().unwrap_or("-").to_owned();
            vec![
                text("id"),
                text("kind"),
                text("state"),
                number("pid"),
                number("child_pid"),
                time("uptime_s"),
                number("restarts"),
                time("next_try_s"),
                text("last_exit"),
                from_home(&found.entry.cwd, home),
            ]
        })
        .collect();
    table::lines(&columns, &rows, width).into_iter().map(|line| line + "\n").collect()
}

fn state_in_words(state: &Value) -> String {
    let text = |member: &str| state[member].as_str().unwrap_or_default().to_owned();
    let mut lines: Vec<(&str, String)> = Vec::new();
    let mut say = |title, words: String| {
        if !words.is_empty() {
            lines.push((title, words));
        }
    };
    let since = state["uptime_s"].as_f64().map(|uptime| format!(" for {}", in_short(uptime))).unwrap_or_default();
    let pid = state["pid"].as_u64().map(|pid| format!(", pid {pid}")).unwrap_or_default();
    say("state", format!("{}{since}{pid}", text("state")));
    if let Some(seconds) = state["next_try_s"].as_f64() {
        say("next try", format!("in {}", in_short(seconds)));
    }
    if let Some(step) = state["restart"]["step"].as_str() {
        say("restart", format!("{step} ({})", state["restart"]["reason"].as_str().unwrap_or_default()));
    }
    let count = |member: &str| state[member].as_u64().unwrap_or_default();
    let crashes = match count("crashes") {
        0 => String::new(),
        1 => ", 1 crash not forgiven yet".to_owned(),
        crashes => format!(", {crashes} crashes not forgiven yet"),
    };
    say("restarts", format!("{}{crashes}", count("restarts")));
    let busy: Vec<String> = [("in_flight", "in flight"), ("held", "held"), ("draining", "draining")]
        .into_iter()
        .filter(|(member, _)| count(member) > 0)
        .map(|(member, words)| format!("{} {words}", count(member)))
        .collect();
    say("requests", busy.join(", "));
    say("last exit", text("last_exit"));
    say("name", text("name"));
    say("command", text("command"));
    say("cwd", text("cwd"));
    say("outlast", format!("pid {}", state["outlast_pid"]));
    say("log", text("log"));
    say("socket", text("socket"));
    let mut words = format!("{} ({})\n", text("id"), text("kind"));
    for (title, line) in lines {
        words.push_str(&format!("  {title:9}  {line}\n"));
    }
    let stderr = text("stderr_tail");
    if !stderr.is_empty() {
        let lines: Vec<&str> = stderr.lines().collect();
        let lines = &lines[lines.len().saturating_sub(STDERR_LINES_MAX)..];
        words.push_str(&format!("  stderr\n    {}\n", lines.join("\n    ")));
    }
    words
}

/// A time as it is read at a glance: `0.4s`, `12s`, `3m`, `5h`, `2d`.
fn in_short(seconds: f64) -> String {
    match seconds {
        s if s < 9.95 => format!("{s:.1}s"),
        s if s < 59.5 => format!("{s:.0}s"),
        s if s < 3570.0 => format!("{:.0}m", s / 60.0),
        s if s < 86_400.0 => {
            let minutes = (s / 60.0) as u64;
            format!("{}h{:02}m", minutes / 60, minutes % 60)
        }
        s => {
            let hours = (s / 3600.0) as u64;
            format!("{}d{:02}h", hours / 24, hours % 24)
        }
    }
}

fn from_home(path: &Path, home: Option<&Path>) -> String {
    match home.and_then(|home| path.strip_prefix(home).ok()) {
        Some(rest) if rest == Path::new("") => "~".to_owned(),
        Some(rest) => PathBuf::from("~").join(rest).display().to_string(),
        None => path.display().to_string(),
    }
}

fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).expect("a value is always JSON")
}

/// To stdout, all of it. Whoever stopped reading has read enough.
pub fn print(text: &str) -> Result<ExitCode, Report> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Report::new(report::FAILURE, "cannot write to stdout").because(error))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}
