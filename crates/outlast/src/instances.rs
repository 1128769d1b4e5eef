//! The commands that speak to what runs: ps, state, pid, restart, switch, reload, stop, resume.

use std::{
    env,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use outlast_core::{redact, visible};
use serde_json::{Value, json};

mod target;

pub use self::target::{
    ANSWER_MAX, Target, ask, ask_plainly, choose, connect, do_to, failed, find, is_halted, registry, resume_hint,
};
use self::target::{STDERR_LINES_MAX, SURVEY_MAX, target_failed};
use crate::{
    base64, cli,
    control::client::{self, AskError, Found},
    environment,
    paint::{self, Paint},
    report::{self, Report},
    table::{self, Column, Yield},
};

/// The most that is typed at once; a frame holds it.
const INJECT_MAX: u64 = 512 << 10;

pub fn ps(arguments: &cli::Ps) -> Result<ExitCode, Report> {
    let found = client::survey(&registry()?, SURVEY_MAX);
    if arguments.json {
        return print_json(&format!("{}\n", pretty(&in_json(&found).into())));
    }
    print(&ps_in_words(&found, env::home_dir().as_deref(), table::room(), Paint::stdout()))
}

pub fn state(which: &cli::Which) -> Result<ExitCode, Report> {
    let target = Target::find(which.id.as_deref())?;
    let state = target.ask("state", json!({}), Some(ANSWER_MAX))?;
    if which.json {
        return print_json(&format!("{}\n", pretty(&state)));
    }
    print(&state_in_words(&state, table::room()))
}

pub fn pid(which: &cli::Which) -> Result<ExitCode, Report> {
    let target = Target::find(which.id.as_deref())?;
    let answer = target.ask("pid", json!({}), Some(ANSWER_MAX))?;
    if which.json {
        return print_json(&format!("{answer}\n"));
    }
    match answer["pid"].as_u64() {
        Some(pid) => print(&format!("{pid}\n")),
        None => Err(Report::new(report::FAILURE, format!("`{}` has no process just now", target.id()))
            .hint(format!("`outlast state {}` says why", target.id()))),
    }
}

pub fn restart(arguments: &cli::Restart) -> Result<ExitCode, Report> {
    let target = Target::find(arguments.which.id.as_deref())?;
    let reason = arguments.reason.as_deref().unwrap_or("asked for on the command line");
    let mode = match (arguments.fresh, arguments.r#continue) {
        (true, _) => Some("fresh"),
        (_, true) => Some("continue"),
        _ => None,
    };
    if target.entry.kind != "session" && mode.is_some() {
        return Err(Report::new(report::USAGE, format!("`{}` is a server and has no conversation", target.id()))
            .hint("`--fresh` and `--continue` are for agents under `outlast run`"));
    }
    if arguments.now && target.entry.kind != "mcp" {
        return Err(Report::new(report::USAGE, format!("`{}` is no server under `outlast mcp`", target.id()))
            .hint("`--now` is for these: leave it out"));
    }
    // As long as it takes: a build and a handshake have limits of their own, and whoever waits can stop waiting.
    let params = json!({"reason": reason, "mode": mode, "now": arguments.now});
    let result = target.ask_plainly("restart", params, None);
    say_restarted(&target, "restart", result, arguments.which.json)
}

pub fn resume(which: &cli::Which) -> Result<ExitCode, Report> {
    let target = Target::find(which.id.as_deref())?;
    let result = target.ask_plainly("resume", json!({}), None);
    match result {
        Ok(report) if report["resumed"] == false && !which.json => {
            let state = report["state"].as_str().unwrap_or("running");
            print(&format!("Nothing to resume: {} is {state}\n", target.id()))
        }
        result => say_restarted(&target, "resume", result, which.json),
    }
}

pub fn switch(arguments: &cli::Switch) -> Result<ExitCode, Report> {
    let target = Target::find(arguments.id.as_deref())?;
    target.is_gateway("turned off and on")?;
    let (name, off) = match (&arguments.off, &arguments.on) {
        (Some(name), _) => (name, true),
        (None, Some(name)) => (name, false),
        (None, None) => unreachable!("clap wants one of them"),
    };
    let answer = target.ask("switch", json!({"name": name, "off": off}), Some(ANSWER_MAX))?;
    if arguments.json {
        let done = json!({"id": target.id(), "name": name, "off": off, "changed": answer["changed"]});
        return print_json(&format!("{}\n", pretty(&done)));
    }
    print(&format!("Turned {} {name} of {}\n", if off { "off" } else { "on" }, target.id()))
}

pub fn reload(which: &cli::Which) -> Result<ExitCode, Report> {
    let target = Target::find(which.id.as_deref())?;
    target.is_gateway("reloaded")?;
    let answer = target.ask("reload", json!({}), None)?;
    if which.json {
        return print_json(&format!("{}\n", pretty(&answer)));
    }
    print(&format!("{}: {}\n", target.id(), answer["detail"].as_str().unwrap_or("the configuration is in force")))
}

pub fn inject(arguments: &cli::Inject) -> Result<ExitCode, Report> {
    let target = Target::find(Some(&arguments.id))?;
    if target.entry.kind != "session" {
        let what = if target.entry.kind == "gateway" && target.backend.is_none() { "gateway" } else { "server" };
        return Err(Report::new(report::USAGE, format!("`{}` is a {what} and has no terminal", target.id()))
            .hint("only agents under `outlast run` can be typed to"));
    }
    let mut bytes = match &arguments.text {
        Some(text) => text.clone().into_bytes(),
        None => {
            let mut bytes = Vec::new();
            let read = io::stdin().lock().take(INJECT_MAX + 1).read_to_end(&mut bytes);
            read.map_err(|error| Report::new(report::FAILURE, "cannot read stdin").because(error))?;
            bytes
        }
    };
    if arguments.enter {
        bytes.push(b'\r');
    }
    if bytes.is_empty() {
        return Err(Report::new(report::USAGE, "there is nothing to type").hint(format!(
            "put it behind the id, `outlast inject {} TEXT`, or on stdin; `--enter` presses Enter",
            target.id()
        )));
    }
    if bytes.len() as u64 > INJECT_MAX {
        return Err(Report::new(report::USAGE, format!("more than {INJECT_MAX} bytes are too much at once"))
            .hint("type it in pieces, or put it into a file and type the file's name"));
    }
    let answer = target.ask("inject", json!({"bytes": base64::encode(&bytes)}), Some(ANSWER_MAX))?;
    if arguments.json {
        return print_json(&format!("{answer}\n"));
    }
    print(&format!("Typed {} bytes into {}\n", answer["n"], target.id()))
}

pub fn stop(arguments: &cli::Stop) -> Result<ExitCode, Report> {
    let target = Target::find(arguments.which.id.as_deref())?;
    if target.backend.is_some() {
        return stop_backend(&target, arguments.which.json);
    }
    let entry = &target.entry;
    let since = Instant::now();
    let stopped = connect(entry).and_then(|mut client| {
        client.ask("stop", json!({"graceful": !arguments.force}), Some(since + ANSWER_MAX))?;
        client.wait_for_end(None)
    });
    stopped.map_err(|error| target_failed(&target, "stop", &error))?;
    if arguments.which.json {
        return print_stopped(&entry.id, since);
    }
    print(&format!("Stopped {} (pid {}) in {} ms\n", entry.id, entry.pid, since.elapsed().as_millis()))
}

/// For programs.
fn print_stopped(id: &str, since: Instant) -> Result<ExitCode, Report> {
    let took_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
    print_json(&format!("{}\n", json!({"id": id, "stopped": true, "took_ms": took_ms})))
}

/// The gateway stays, and so does what it knows of the backend.
fn stop_backend(target: &Target, in_json: bool) -> Result<ExitCode, Report> {
    let since = Instant::now();
    target.ask("stop", json!({}), Some(ANSWER_MAX))?;
    let id = target.id();
    if in_json {
        return print_stopped(&id, since);
    }
    print(&format!("Stopped {id}; `outlast resume {id}` starts it again\n"))
}

// ---- words ---------------------------------------------------------------------------------------------------

fn say_restarted(
    target: &Target,
    method: &str,
    result: Result<Value, AskError>,
    in_json: bool,
) -> Result<ExitCode, Report> {
    match result {
        Ok(report) if in_json => print_json(&format!("{}\n", pretty(&report))),
        Ok(report) => print(&restarted_in_words(&target.id(), &report)),
        Err(AskError::Refused(refusal)) if in_json => {
            let mut error = json!({"code": refusal.code, "message": refusal.message});
            if let (Some(error), Some(data)) = (error.as_object_mut(), refusal.data.as_object()) {
                error.extend(data.clone());
            }
            print_json(&format!("{}\n", pretty(&json!({"error": error}))))?;
            Ok(ExitCode::from(report::FAILURE))
        }
        Err(error) => Err(target_failed(target, method, &error)),
    }
}

fn restarted_in_words(id: &str, report: &Value) -> String {
    if let Some(backends) = report["backends"].as_array() {
        return backends.iter().map(|one| restarted_in_words(&name_below(id, &one["name"]), one)).collect();
    }
    if let Some(error) = report["error"].as_str() {
        return format!("{id} is not back yet: {error}\n");
    }
    // A server that is spoken to over HTTP has no process here.
    let pids = match (report["old_pid"].as_u64(), report["new_pid"].as_u64()) {
        (Some(old), Some(new)) => format!(": pid {old} → {new}"),
        (None, Some(new)) => format!(": pid {new}"),
        (Some(old), None) => format!(": pid {old} has ended"),
        (None, None) => String::new(),
    };
    let mut words = format!("Restarted {id} in {} ms{pids}\n", report["took_ms"]);
    let tools = &report["tools"];
    if tools.is_null() || tools["compared"] == false {
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

fn name_below(id: &str, name: &Value) -> String {
    format!("{id}/{}", name.as_str().unwrap_or_default())
}

/// Everybody in `ps --json`.
pub fn in_json(found: &[Found]) -> Vec<Value> {
    found.iter().flat_map(rows_in_json).collect()
}

/// One instance in `ps --json`, and behind it its backends.
fn rows_in_json(found: &Found) -> Vec<Value> {
    let row = row_in_json(found);
    let backends = found.state.as_ref().and_then(|state| state["backends"].as_array());
    let below = backends.into_iter().flatten().map(|backend| backend_in_json(&row, backend)).collect::<Vec<_>>();
    [row].into_iter().chain(below).collect()
}

fn backend_in_json(gateway: &Value, backend: &Value) -> Value {
    let mut row = gateway.clone();
    let id = gateway["id"].as_str().unwrap_or_default();
    row["id"] = name_below(id, &backend["name"]).into();
    row["kind"] = "backend".into();
    row["name"] = backend["name"].clone();
    row["child_pid"] = backend["pid"].clone();
    row["command"] = backend["command"].clone();
    let of_its_own = [
        "state",
        "uptime_s",
        "restarts",
        "crashes",
        "next_try_s",
        "generation",
        "in_flight",
        "stalled",
        "oldest_request_s",
        "calls",
        "calls_per_s",
        "p50_ms",
        "last_reload",
    ];
    for member in of_its_own {
        row[member] = backend[member].clone();
    }
    set_last_exit(&mut row, backend);
    row
}

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
        "generation": state["generation"],
        "in_flight": state["in_flight"],
        "stalled": state["stalled"],
        "oldest_request_s": state["oldest_request_s"],
        "calls": state["calls"],
        "calls_per_s": state["calls_per_s"],
        "p50_ms": state["p50_ms"],
        "last_reload": state["last_reload"],
    });
    for member in ["id", "kind", "name", "cwd", "socket", "started", "command", "log", "audit"] {
        row[member] = about[member].clone();
    }
    set_last_exit(&mut row, state);
    row
}

/// In a list every kind has the same types: an exit code or null, and how it ended in words.
fn set_last_exit(row: &mut Value, state: &Value) {
    let exit =
        state["last_exits"].as_array().and_then(|exits| exits.last()).map(|last| &last["exit"]).unwrap_or(&Value::Null);
    let signalled = || exit["signal"].as_i64().map(|signal| 128 + signal);
    let code = state["last_exit"].as_i64().or_else(|| exit["code"].as_i64()).or_else(signalled);
    row["last_exit"] = code.into();
    row["last_exit_text"] = last_exit_in_words(state).into();
}

/// How the last child ended: a session has a code beside it, a server only the words.
pub fn last_exit_in_words(state: &Value) -> Option<String> {
    state["last_exit_text"].as_str().or_else(|| state["last_exit"].as_str()).map(str::to_owned)
}

fn ps_in_words(found: &[Found], home: Option<&Path>, width: Option<usize>, paint: Paint) -> String {
    if found.is_empty() {
        return "Nothing runs under outlast.\n".to_owned();
    }
    let column = |title, is_number, yields| Column { title, is_number, yields };
    let columns = [
        column("ID", false, Yield::Last(12)),
        column("KIND", false, Yield::Soon(1)),
        column("STATE", false, Yield::End(12, 12)),
        column("PID", true, Yield::Soon(2)),
        column("CHILD", true, Yield::Last(6)),
        column("UPTIME", true, Yield::Last(6)),
        column("RESTARTS", true, Yield::Late(2)),
        column("NEXT", true, Yield::Late(1)),
        column("LAST-EXIT", false, Yield::End(12, 9)),
        column("CWD", false, Yield::Beginning(16, 8)),
    ];
    let rows: Vec<Vec<String>> = found
        .iter()
        .flat_map(rows_in_json)
        .map(|row| {
            let nothing = || table::NOTHING.to_owned();
            let number = |member: &str| row[member].as_u64().map_or_else(nothing, |number| number.to_string());
            let time = |member: &str| row[member].as_f64().map_or_else(nothing, in_short);
            let text = |member: &str| row[member].as_str().unwrap_or(table::NOTHING).to_owned();
            vec![
                text("id"),
                text("kind"),
                text("state") + state_suffix(&row),
                number("pid"),
                number("child_pid"),
                time("uptime_s"),
                number("restarts"),
                time("next_try_s"),
                text("last_exit_text"),
                from_home(Path::new(row["cwd"].as_str().unwrap_or_default()), home),
            ]
        })
        .collect();
    let dress = |title: &str, cell: &str| match (title, cell) {
        ("STATE", "given_up" | "halted") => paint.red(cell),
        ("STATE", cell) if cell.ends_with(RELOAD_FAILED) || cell.ends_with(STALLED) => paint.yellow(cell),
        ("STATE", "backoff" | "unresponsive") | ("NEXT", _) if cell != table::NOTHING => paint.yellow(cell),
        ("STATE", "starting" | "started" | "reloading" | "stopping") => paint.cyan(cell),
        ("STATE", "stopped") | (_, table::NOTHING) => paint.dim(cell),
        ("STATE", _) => paint.green(cell),
        _ => cell.to_owned(),
    };
    table::dressed(&columns, &rows, width, &dress).into_iter().map(|line| line + "\n").collect()
}

fn state_in_words(state: &Value, width: Option<usize>) -> String {
    let text = |member: &str| state[member].as_str().unwrap_or_default().to_owned();
    let mut lines: Vec<(&str, String)> = Vec::new();
    let mut say = |title, words: String| {
        if !words.is_empty() {
            lines.push((title, words));
        }
    };
    let since = state["uptime_s"].as_f64().map(|uptime| format!(" for {}", in_short(uptime))).unwrap_or_default();
    let pid = state["pid"].as_u64().map(|pid| format!(", pid {pid}")).unwrap_or_default();
    let health = state["health"].as_str().filter(|health| *health != "healthy" && *health != text("state"));
    let health = health.map(|health| format!(", {health}")).unwrap_or_default();
    say("state", format!("{}{since}{pid}{health}", text("state")));
    if let Some(seconds) = state["next_try_s"].as_f64() {
        say("next try", format!("in {}", in_short(seconds)));
    }
    if let Some(failure) = failed_reload(state) {
        let ago = failure["seconds_ago"].as_f64().map(in_short).unwrap_or_default();
        let why = failure["error"].as_str().unwrap_or_default();
        let serves = match (state["kind"].as_str(), state["pid"].is_u64()) {
            (Some("gateway"), _) => ", the configuration before it stays in force",
            (_, true) => ", the old server keeps serving",
            (_, false) => "",
        };
        say("reload", format!("failed {ago} ago{serves}: {}", why.replace('\n', " ")));
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
    if let (Some(columns), Some(rows)) = (state["columns"].as_u64(), state["rows"].as_u64()) {
        say("terminal", format!("{columns} × {rows}, {} attached", count("attached")));
    }
    let waits = match (state["waiting_for_input"].as_bool(), state["stance"].as_str()) {
        (Some(true), Some("dialog")) => "for a choice",
        (Some(true), _) => "for input",
        _ => "",
    };
    say("waiting", waits.to_owned());
    let busy: Vec<String> = [("in_flight", "in flight"), ("held", "held"), ("draining", "draining")]
        .into_iter()
        .filter(|(member, _)| count(member) > 0)
        .map(|(member, words)| format!("{} {words}", count(member)))
        .collect();
    let oldest = state["oldest_request_s"].as_f64().map(|age| format!(", the oldest for {}", in_short(age)));
    say("requests", busy.join(", ") + oldest.filter(|_| !busy.is_empty()).as_deref().unwrap_or_default());
    if state["stalled"] == true {
        say(
            "stalled",
            "the server does not answer: `outlast restart --now` replaces it and fails its calls".to_owned(),
        );
    }
    let muted: Vec<&str> = state["muted"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if !muted.is_empty() {
        say("muted", format!("{} (changed right after each start; no reload for now)", muted.join(", ")));
    }
    say("last exit", last_exit_in_words(state).unwrap_or_default());
    say("name", text("name"));
    say("command", text("command"));
    let source = state["cwd_source"].as_str().map(|source| format!(" ({source})")).unwrap_or_default();
    say("cwd", format!("{}{source}", text("cwd")));
    say("document", text("document"));
    say("agent id", text("conversation"));
    let left_out = state["env_left_out"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let left_out = left_out.collect::<Vec<_>>().join(", ");
    if !left_out.is_empty() {
        say("not passed", format!("{left_out}; {}", environment::HOW_TO_PASS));
    }
    if let Some(pid) = state["outlast_pid"].as_u64() {
        say("outlast", format!("pid {pid}"));
    }
    say("listen", text("listen"));
    say("page", text("status_page"));
    say("log", text("log"));
    say("socket", text("socket"));
    let mut words = format!("{} ({})\n", text("id"), text("kind"));
    for (title, line) in lines {
        words.push_str(&format!("  {title:9}  {}\n", table::hanging(&line, 13, width)));
    }
    if let Some(backends) = state["backends"].as_array() {
        words.push_str(&backends_in_words(backends, width));
    }
    for collision in collisions_in_words(&state["collisions"]) {
        words.push_str(&format!("  collision  {collision}\n"));
    }
    let more = count("collision_count").saturating_sub(state["collisions"].as_array().map_or(0, Vec::len) as u64);
    if more > 0 {
        let names = if more == 1 { "name" } else { "names" };
        words.push_str(&format!("  collision  and {more} more {names}\n"));
    }
    let stderr = redact::text(&text("stderr_tail")).into_owned();
    if !stderr.is_empty() {
        let lines: Vec<&str> = stderr.lines().collect();
        let lines = &lines[lines.len().saturating_sub(STDERR_LINES_MAX)..];
        words.push_str(&format!("  stderr\n    {}\n", lines.join("\n    ")));
    }
    words
}

/// Names that several backends of a gateway offer, one a line, with both owners.
pub fn collisions_in_words(collisions: &Value) -> Vec<String> {
    let words = |collision: &Value| {
        let text = |member: &str| collision[member].as_str().unwrap_or_default().to_owned();
        let (list, name, owner, other) = (text("list"), text("name"), text("offered_by"), text("left_out"));
        match owner == other {
            true => format!("{list}: `{name}` is listed twice by {owner}; only the first counts"),
            false => format!("{list}: `{name}` belongs to {owner}; that of {other} is left out"),
        }
    };
    collisions.as_array().into_iter().flatten().map(words).collect()
}

/// What `ps` and `top` add to the state of a server whose last reload failed.
pub const RELOAD_FAILED: &str = ", reload failed";
/// What stands behind the state of a server that does not answer.
pub const STALLED: &str = ", stalled";

/// What else is wrong with a server, behind its state.
fn state_suffix(state: &Value) -> &'static str {
    match failed_reload(state) {
        _ if state["stalled"] == true => STALLED,
        Some(_) => RELOAD_FAILED,
        None => "",
    }
}

/// The last reload, if it failed and its server still runs the old code: one that was started since has tried the new.
pub fn failed_reload(state: &Value) -> Option<&Value> {
    let last = &state["last_reload"];
    let is_newer = match (state["uptime_s"].as_f64(), last["seconds_ago"].as_f64()) {
        (Some(uptime), Some(ago)) => uptime < ago,
        _ => false,
    };
    // A gateway's backend stays as it was, however often it is started, until its configuration is taken.
    (last["ok"] == false && (!is_newer || last["pending"] == true)).then_some(last)
}

/// The backends of a gateway, one a line.
fn backends_in_words(backends: &[Value], width: Option<usize>) -> String {
    if backends.is_empty() {
        return "  backends   none\n".to_owned();
    }
    let column = |title, is_number, yields| Column { title, is_number, yields };
    let columns = [
        column("BACKEND", false, Yield::Last(10)),
        column("STATE", false, Yield::End(12, 12)),
        column("PID", true, Yield::Soon(2)),
        column("UPTIME", true, Yield::Soon(1)),
        column("TOOLS", true, Yield::Late(1)),
        column("FLIGHT", true, Yield::Soon(3)),
        column("RESTARTS", true, Yield::Late(2)),
        column("NEXT", true, Yield::Last(4)),
        column("LAST-EXIT", false, Yield::End(12, 9)),
    ];
    let rows: Vec<Vec<String>> = backends
        .iter()
        .map(|backend| {
            let nothing = || table::NOTHING.to_owned();
            let number = |member: &str| backend[member].as_u64().map_or_else(nothing, |number| number.to_string());
            let time = |member: &str| backend[member].as_f64().map_or_else(nothing, in_short);
            let text = |member: &str| backend[member].as_str().unwrap_or(table::NOTHING).to_owned();
            let stale = if backend["stale"] == true { " (stale)" } else { "" };
            vec![
                text("name"),
                text("state") + state_suffix(backend),
                number("pid"),
                time("uptime_s"),
                number("tools") + stale,
                number("in_flight"),
                number("restarts"),
                time("next_try_s"),
                last_exit_in_words(backend).unwrap_or_else(|| table::NOTHING.to_owned()),
            ]
        })
        .collect();
    let width = width.map(|width| width.saturating_sub(2));
    table::lines(&columns, &rows, width).into_iter().map(|line| format!("  {line}\n")).collect()
}

/// A time as it is read at a glance: `0.4s`, `12s`, `3m`, `5h`, `2d`.
pub fn in_short(seconds: f64) -> String {
    match seconds {
        s if s < 9.95 => format!("{s:.1}s"),
        s if s < 59.5 => format!("{s:.0}s"),
        s if s < 3600.0 => format!("{}m", (s.max(60.0) / 60.0) as u64),
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

pub fn from_home(path: &Path, home: Option<&Path>) -> String {
    match home.and_then(|home| path.strip_prefix(home).ok()) {
        Some(rest) if rest == Path::new("") => "~".to_owned(),
        Some(rest) => PathBuf::from("~").join(rest).display().to_string(),
        None => path.display().to_string(),
    }
}

pub fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).expect("a value is always JSON")
}

/// Text for people to stdout, all of it. Nothing in it steers the terminal but the colours of [`Paint`]. A reader that has
/// gone away is no error.
pub fn print(text: &str) -> Result<ExitCode, Report> {
    write_out(&paint::finish(text))
}

/// JSON for programs to stdout, also as lines. What a terminal could obey is escaped.
pub fn print_json(text: &str) -> Result<ExitCode, Report> {
    write_out(&visible::json(text))
}

fn write_out(text: &str) -> Result<ExitCode, Report> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Report::new(report::FAILURE, "cannot write to stdout").because(error))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::registry::Entry;

    pub(super) fn entry(id: &str, name: &str, cwd: &str) -> Entry {
        Entry {
            id: id.into(),
            kind: "mcp".into(),
            name: name.into(),
            pid: 4240,
            born: "x".into(),
            started: 0.0,
            cwd: cwd.into(),
            socket: format!("/home/me/.local/state/outlast/run/{id}.sock").into(),
            command: "python -m weather".into(),
            log: Some(format!("{cwd}/.outlast/logs/{id}.log").into()),
            audit: None,
        }
    }

    fn found(entry: Entry, state: Value) -> Found {
        Found { entry, state: (!state.is_null()).then_some(state) }
    }

    #[test]
    fn ps_fits_the_terminal() {
        let crashed = "signal 9 (SIGKILL)";
        let all = [
            found(
                entry("weather-1abcd", "weather", "/home/me/projects/weather"),
                json!({"state": "ready", "pid": 4242, "uptime_s": 7384.0, "restarts": 0}),
            ),
            found(
                entry("github-mcp-7k2mq", "github-mcp", "/home/me/projects/assistant/servers/github"),
                json!({"state": "backoff", "pid": null, "restarts": 12, "next_try_s": 4.2, "last_exit": crashed}),
            ),
            found(entry("py-zz9yx", "py", "/srv/data"), Value::Null),
            found(
                entry("server-everything-0qwer", "server-everything", "/home/me"),
                json!({"state": "given_up", "restarts": 5, "last_exit": "exit code 1"}),
            ),
        ];
        let home = Some(Path::new("/home/me"));
        insta::assert_snapshot!(ps_in_words(&all, home, Some(140), Paint::plain()), @"
        ID                       KIND  STATE          PID  CHILD  UPTIME  RESTARTS  NEXT  LAST-EXIT           CWD
        weather-1abcd            mcp   ready         4240   4242   2h03m         0     -  -                   ~/projects/weather
        github-mcp-7k2mq         mcp   backoff       4240      -       -        12  4.2s  signal 9 (SIGKILL)  ~/projects/assistant/servers/github
        py-zz9yx                 mcp   unresponsive  4240      -       -         -     -  -                   /srv/data
        server-everything-0qwer  mcp   given_up      4240      -       -         5     -  exit code 1         ~
        ");
        insta::assert_snapshot!(ps_in_words(&all, home, Some(80), Paint::plain()), @"
        ID                      STATE        CHILD UPTIME RESTARTS LAST-EXIT  CWD
        weather-1abcd           ready         4242  2h03m        0 -          …s/weather
        github-mcp-7k2mq        backoff          -      -       12 signal 9   …rs/github
                                                                   (SIGKILL)
        py-zz9yx                unresponsive     -      -        - -          /srv/data
        server-everything-0qwer given_up         -      -        5 exit code  ~
                                                                   1
        ");
        insta::assert_snapshot!(ps_in_words(&[], home, Some(80), Paint::plain()), @"Nothing runs under outlast.");
        for width in [80, 100, 140] {
            for line in ps_in_words(&all, home, Some(width), Paint::plain()).lines() {
                assert!(line.chars().count() <= width, "{line}");
            }
        }
    }

    #[test]
    fn a_gateway_shows_its_backends() {
        let gateway = json!({
            "id": "tools-1abcd", "kind": "gateway", "name": "tools", "state": "running", "outlast_pid": 4240,
            "restarts": 3, "cwd": "/srv", "backends": [
                {"name": "github", "state": "ready", "pid": 4242, "uptime_s": 61.0, "tools": 26, "in_flight": 2,
                    "restarts": 0},
                {"name": "files", "state": "backoff", "tools": 14, "stale": true, "in_flight": 0, "restarts": 3,
                    "next_try_s": 4.0, "last_exit": "signal 9 (SIGKILL)"},
            ],
        });
        insta::assert_snapshot!(state_in_words(&gateway, Some(100)), @"
        tools-1abcd (gateway)
          state      running
          restarts   3
          name       tools
          cwd        /srv
          outlast    pid 4240
          BACKEND  STATE     PID  UPTIME       TOOLS  FLIGHT  RESTARTS  NEXT  LAST-EXIT
          github   ready    4242      1m          26       2         0     -  -
          files    backoff     -       -  14 (stale)       0         3  4.0s  signal 9 (SIGKILL)
        ");
        let found = found(Entry { kind: "gateway".into(), ..entry("tools-1abcd", "tools", "/srv") }, gateway);
        insta::assert_snapshot!(ps_in_words(&[found], None, Some(100), Paint::plain()), @"
        ID                  KIND     STATE     PID  CHILD  UPTIME  RESTARTS  NEXT  LAST-EXIT           CWD
        tools-1abcd         gateway  running  4240      -       -         3     -  -                   /srv
        tools-1abcd/github  backend  ready    4240   4242      1m         0     -  -                   /srv
        tools-1abcd/files   backend  backoff  4240      -       -         3  4.0s  signal 9 (SIGKILL)  /srv
        ");
    }

    #[test]
    fn a_state_says_what_is_known() {
        let state = json!({
            "id": "weather-1abcd", "kind": "mcp", "name": "weather", "state": "reloading", "pid": 4242,
            "outlast_pid": 4240, "uptime_s": 12.3, "restarts": 3, "crashes": 1, "in_flight": 2, "held": 0, "draining": 1,
            "next_try_s": null, "last_exit": "exit code 1", "command": "python -m weather", "cwd": "/srv/weather",
            "log": "/srv/weather/.outlast/logs/weather-1abcd.log", "socket": "/home/me/x.sock",
            "restart": {"step": "the build is running", "reason": "changed: a.py"},
            "stderr_tail": "Traceback (most recent call last):\nValueError: no",
        });
        insta::assert_snapshot!(state_in_words(&state, None), @"
        weather-1abcd (mcp)
          state      reloading for 12s, pid 4242
          restart    the build is running (changed: a.py)
          restarts   3, 1 crash not forgiven yet
          requests   2 in flight, 1 draining
          last exit  exit code 1
          name       weather
          command    python -m weather
          cwd        /srv/weather
          outlast    pid 4240
          log        /srv/weather/.outlast/logs/weather-1abcd.log
          socket     /home/me/x.sock
          stderr
            Traceback (most recent call last):
            ValueError: no
        ");
        let state = json!({"id": "weather-1abcd", "kind": "mcp", "state": "backoff", "next_try_s": 4.0, "restarts": 1,
            "crashes": 4, "outlast_pid": 4240});
        insta::assert_snapshot!(state_in_words(&state, None), @"
        weather-1abcd (mcp)
          state      backoff
          next try   in 4.0s
          restarts   1, 4 crashes not forgiven yet
          outlast    pid 4240
        ");
        let state = json!({"id": "night", "kind": "session", "state": "ready", "uptime_s": 61.0, "pid": 7, "restarts": 0,
            "outlast_pid": 4240, "columns": 101, "rows": 33, "attached": 2, "waiting_for_input": true,
            "stance": "dialog", "conversation": "11111111", "command": "claude"});
        insta::assert_snapshot!(state_in_words(&state, None), @"
        night (session)
          state      ready for 1m, pid 7
          restarts   0
          terminal   101 × 33, 2 attached
          waiting    for a choice
          command    claude
          agent id   11111111
          outlast    pid 4240
        ");
        for (health, words) in [("halted", "state      halted\n"), ("degraded", "state      halted, degraded\n")] {
            let said =
                state_in_words(&json!({"id": "s", "kind": "session", "state": "halted", "health": health}), None);
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn a_failed_reload_says_what_serves_now() {
        let last = json!({"ok": false, "error": "the new server ended (exit code 1)", "seconds_ago": 4.0});
        let table = [
            (
                json!({"kind": "mcp", "state": "ready", "pid": 7, "uptime_s": 9.0}),
                "ago, the old server keeps serving: the",
            ),
            (json!({"kind": "mcp", "state": "backoff", "next_try_s": 1.0}), "ago: the new server ended"),
            (json!({"kind": "gateway", "state": "running", "uptime_s": 9.0}), "ago, the configuration before it stays"),
        ];
        for (mut state, words) in table {
            state["last_reload"] = last.clone();
            let said = state_in_words(&state, None);
            assert!(said.contains(&format!("reload     failed 4.0s {words}")), "{said}");
        }
    }

    #[test]
    fn a_table_fits_a_narrow_terminal() {
        let state = json!({"state": "backoff", "uptime_s": null, "restarts": 3, "crashes": 3, "next_try_s": 4.2,
            "last_exit": "could not be started: no program named `./nosuch`",
            "last_reload": {"ok": false, "error": "no", "seconds_ago": 1.0}});
        let all = [found(entry("weather-forecast-service-61pkp", "weather", "/srv/a project/with a long name"), state)];
        for width in [40, 60, 80, 120] {
            let said = ps_in_words(&all, None, Some(width), Paint::plain());
            assert!(said.lines().all(|line| line.chars().count() <= width), "{width}\n{said}");
            assert!(said.contains("weather-for") && said.contains("backoff"), "{width}\n{said}");
        }
    }

    #[test]
    fn a_restart_says_what_changed() {
        let report = json!({"old_pid": 4242, "new_pid": 4250, "took_ms": 87,
            "tools": {"added": ["sum", "product"], "removed": ["old"], "changed": ["echo"]},
            "draining": "2 calls left on the old server"});
        insta::assert_snapshot!(restarted_in_words("weather-1abcd", &report), @"
        Restarted weather-1abcd in 87 ms: pid 4242 → 4250
          tools added:   sum, product
          tools removed: old
          tools changed: echo
          2 calls left on the old server
        ");
        let report = json!({"old_pid": null, "new_pid": 4250, "took_ms": 87, "tools": {"added": []}});
        insta::assert_snapshot!(restarted_in_words("weather-1abcd", &report), @"
        Restarted weather-1abcd in 87 ms: pid 4250
          its tools are the same
        ");
        let report = json!({"old_pid": null, "new_pid": null, "took_ms": 87});
        insta::assert_snapshot!(restarted_in_words("tools-1abcd/far", &report), @"Restarted tools-1abcd/far in 87 ms");
        let report = json!({"old_pid": 1, "new_pid": 2, "took_ms": 3, "tools": {"compared": false}});
        insta::assert_snapshot!(restarted_in_words("weather-1abcd", &report), @"Restarted weather-1abcd in 3 ms: pid 1 → 2");
    }

    #[test]
    fn times_are_short() {
        let table = [
            (0.04, "0.0s"),
            (4.2, "4.2s"),
            (9.96, "10s"),
            (59.0, "59s"),
            (61.0, "1m"),
            (119.0, "1m"),
            (3599.0, "59m"),
            (3600.0, "1h00m"),
            (7384.0, "2h03m"),
            (90_000.0, "1d01h"),
        ];
        for (seconds, words) in table {
            assert_eq!(in_short(seconds), words);
        }
    }
}
