//! The commands that send requests to running instances: ps, state, pid, restart, switch, reload, stop, resume.

use std::{
    env,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use outlast_control::{
    answer::{Client, Collision, Done, Restarted, Restarting, State},
    client::{self, AskError, Found},
    find::{ANSWER_MAX, SURVEY_MAX, registry},
    method::{Inject, Method, Restart, Stop, Switch},
};
use outlast_core::{redact, session::Mode, visible};
use serde_json::{Map, Value, json};

mod target;

use self::target::{STDERR_LINES_MAX, target_failed};
pub(crate) use self::target::{Target, ask, ask_plainly, connect, do_to, failed, is_halted, resume_hint};

use super::{cluster, upgrade};
use crate::{
    child::environment,
    cli::{
        self,
        paint::{self, Paint},
        report::{self, Report},
        table::{self, Column, Yield},
    },
};

/// The most bytes typed in one call; they fit into one frame.
const INJECT_MAX: u64 = 512 << 10;

pub(crate) fn ps(arguments: &cli::Ps) -> Result<ExitCode, Report> {
    if arguments.cluster {
        return cluster::ps(arguments);
    }
    let registry = registry()?;
    let found = client::survey(&registry, SURVEY_MAX);
    for (path, why) in registry.unusable() {
        let says = format!("the registry entry {} cannot be used: {}", path.display(), report::plain(&why));
        eprintln!("{}\n  hint: `outlast doctor` shows how to correct it", visible::text(&format!("warning: {says}")));
    }
    if arguments.json {
        return print_json(&format!("{}\n", pretty(&in_json(&found).into())));
    }
    let table = ps_in_words(&found, env::home_dir().as_deref(), table::room(), Paint::stdout());
    print(&(table + &upgrade::hint(&found).unwrap_or_default()))
}

pub(crate) fn state(arguments: &cli::ShowState) -> Result<ExitCode, Report> {
    let which = &arguments.which;
    if arguments.cluster {
        return cluster::state(which);
    }
    let target = Target::find(which.id.as_deref())?;
    let state = target.ask(&Method::State, Some(ANSWER_MAX))?;
    if which.json {
        return print_json(&format!("{}\n", pretty(&state)));
    }
    print(&state_in_words(&State::read(&state), table::room()))
}

pub(crate) fn pid(which: &cli::Which) -> Result<ExitCode, Report> {
    let target = Target::find(which.id.as_deref())?;
    let answer = target.ask(&Method::Pid, Some(ANSWER_MAX))?;
    if which.json {
        return print_json(&format!("{answer}\n"));
    }
    match State::read(&answer).pid {
        Some(pid) => print(&format!("{pid}\n")),
        None => Err(Report::new(report::FAILURE, format!("`{}` has no running process", target.id()))
            .hint(format!("`outlast state {}` shows the reason", target.id()))),
    }
}

pub(crate) fn restart(arguments: &cli::Restart) -> Result<ExitCode, Report> {
    if arguments.cluster {
        return cluster::restart(arguments);
    }
    let target = Target::find(arguments.which.id.as_deref())?;
    let reason = arguments.reason.as_deref().unwrap_or("requested on the command line");
    let mode = match (arguments.fresh, arguments.r#continue) {
        (true, _) => Some(Mode::Fresh),
        (_, true) => Some(Mode::Continue),
        _ => None,
    };
    if target.entry.kind != "session" && mode.is_some() {
        return Err(Report::new(report::USAGE, format!("`{}` is a server, not an agent", target.id()))
            .hint("`--fresh` and `--continue` are for agents of `outlast run`"));
    }
    if arguments.now && target.entry.kind != "mcp" {
        return Err(Report::new(report::USAGE, format!("`{}` is not a server of `outlast mcp`", target.id()))
            .hint("`--now` works only with these: remove it"));
    }
    // No deadline: a build and a handshake have their own limits, and the user can interrupt the command.
    let (reason, now) = (Some(reason.to_owned()), arguments.now);
    let restart = Method::Restart(Restart { reason, mode, now, cluster: false });
    let result = target.ask_plainly(&restart, None);
    say_restarted(&target, "restart", result, arguments.which.json)
}

pub(crate) fn resume(which: &cli::Which) -> Result<ExitCode, Report> {
    let target = Target::find(which.id.as_deref())?;
    let result = target.ask_plainly(&Method::Resume, None);
    match result {
        Ok(answer) if !which.json => match Restarted::read(&answer).nothing_to_resume() {
            Some(state) => print(&format!("Nothing to resume: {} is {state}\n", target.id())),
            None => say_restarted(&target, "resume", Ok(answer), false),
        },
        result => say_restarted(&target, "resume", result, which.json),
    }
}

pub(crate) fn switch(arguments: &cli::Switch) -> Result<ExitCode, Report> {
    let target = match arguments.cluster {
        true => Target::from(&cluster::find_gateway(arguments.id.as_deref())?),
        false => Target::find(arguments.id.as_deref())?,
    };
    target.is_gateway("turned off and on")?;
    let (name, off) = match (&arguments.off, &arguments.on) {
        (Some(name), _) => (name, true),
        (None, Some(name)) => (name, false),
        (None, None) => unreachable!("clap wants one of them"),
    };
    let answer = target.ask(&Method::Switch(Switch { name: Some(name.clone()), off }), Some(ANSWER_MAX))?;
    if arguments.json {
        let done = json!({"id": target.id(), "name": name, "off": off, "changed": Done::read(&answer).changed});
        return print_json(&format!("{}\n", pretty(&done)));
    }
    print(&format!("Turned {} {name} of {}\n", if off { "off" } else { "on" }, target.id()))
}

pub(crate) fn reload(which: &cli::Which) -> Result<ExitCode, Report> {
    let target = Target::find(which.id.as_deref())?;
    target.is_gateway("reloaded")?;
    let answer = target.ask(&Method::Reload, None)?;
    if which.json {
        return print_json(&format!("{}\n", pretty(&answer)));
    }
    let detail = Done::read(&answer).detail;
    print(&format!("{}: {}\n", target.id(), detail.as_deref().unwrap_or("the configuration is in force")))
}

pub(crate) fn inject(arguments: &cli::Inject) -> Result<ExitCode, Report> {
    let target = Target::find(Some(&arguments.id))?;
    if target.entry.kind != "session" {
        let what = if target.entry.kind == "gateway" && target.backend.is_none() { "gateway" } else { "server" };
        return Err(Report::new(report::USAGE, format!("`{}` is a {what} and has no terminal", target.id()))
            .hint("only agents of `outlast run` have a terminal"));
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
            "give the text after the id, `outlast inject {} TEXT`, or on stdin; `--enter` presses Enter",
            target.id()
        )));
    }
    if bytes.len() as u64 > INJECT_MAX {
        return Err(Report::new(report::USAGE, format!("the text is longer than {INJECT_MAX} bytes"))
            .hint("send it in parts, or put it into a file and send the file's name"));
    }
    let answer = target.ask(&Method::Inject(Inject { bytes }), Some(ANSWER_MAX))?;
    if arguments.json {
        return print_json(&format!("{answer}\n"));
    }
    print(&format!("Typed {} bytes into {}\n", Done::read(&answer).n, target.id()))
}

pub(crate) fn stop(arguments: &cli::Stop) -> Result<ExitCode, Report> {
    let target = Target::find(arguments.which.id.as_deref())?;
    if target.backend.is_some() {
        return stop_backend(&target, arguments.which.json);
    }
    let entry = &target.entry;
    let since = Instant::now();
    let stopped = connect(entry).and_then(|mut client| {
        client.ask(&Method::Stop(Stop { graceful: Some(!arguments.force) }), Some(since + ANSWER_MAX))?;
        client.wait_for_end(None)
    });
    stopped.map_err(|error| target_failed(&target, "stop", &error))?;
    if arguments.which.json {
        return print_stopped(&entry.id, since);
    }
    print(&format!("Stopped {} (pid {}) in {} ms\n", entry.id, entry.pid, since.elapsed().as_millis()))
}

/// As JSON, for programs.
fn print_stopped(id: &str, since: Instant) -> Result<ExitCode, Report> {
    let took_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
    print_json(&format!("{}\n", json!({"id": id, "stopped": true, "took_ms": took_ms})))
}

/// The gateway runs on and keeps what it knows of the backend.
fn stop_backend(target: &Target, in_json: bool) -> Result<ExitCode, Report> {
    let since = Instant::now();
    target.ask(&Method::Stop(Stop::default()), Some(ANSWER_MAX))?;
    let id = target.id();
    if in_json {
        return print_stopped(&id, since);
    }
    print(&format!("Stopped {id}; `outlast resume {id}` starts it again\n"))
}

// ---- texts ---------------------------------------------------------------------------------------------------

fn say_restarted(
    target: &Target,
    method: &str,
    result: Result<Value, AskError>,
    in_json: bool,
) -> Result<ExitCode, Report> {
    match result {
        Ok(report) if in_json => print_json(&format!("{}\n", pretty(&report))),
        Ok(report) => print(&restarted_in_words(&target.id(), &Restarted::read(&report))),
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

pub(super) fn restarted_in_words(id: &str, restarted: &Restarted) -> String {
    if let Some(backends) = &restarted.backends {
        return backends.iter().map(|one| restarted_in_words(&name_below(id, &one.name), one)).collect();
    }
    if let Some(error) = &restarted.error {
        return format!("{id} is not ready yet: {error}\n");
    }
    // A server that is reached over HTTP has no process here.
    let pids = match (restarted.old_pid, restarted.new_pid) {
        (Some(old), Some(new)) => format!(": pid {old} → {new}"),
        (None, Some(new)) => format!(": pid {new}"),
        (Some(old), None) => format!(": pid {old} has ended"),
        (None, None) => String::new(),
    };
    let mut words = format!("Restarted {id} in {} ms{pids}\n", restarted.took_ms);
    let Some(tools) = restarted.tools.as_ref().filter(|tools| tools.compared != Some(false)) else {
        return words;
    };
    let mut is_same = true;
    for (what, names) in [("added", &tools.added), ("removed", &tools.removed), ("changed", &tools.changed)] {
        if !names.is_empty() {
            is_same = false;
            words.push_str(&format!("  tools {:8} {}\n", format!("{what}:"), names.join(", ")));
        }
    }
    if is_same {
        words.push_str("  its tools are unchanged\n");
    }
    if let Some(draining) = &restarted.draining {
        words.push_str(&format!("  {draining}\n"));
    }
    words
}

fn name_below(id: &str, name: &str) -> String {
    format!("{id}/{name}")
}

/// The members of `ps --json` that an instance or a backend reports.
const OF_STATE: [&str; 14] = [
    "state",
    "uptime_s",
    "restarts",
    "crashes",
    "next_try_s",
    "limited_until",
    "generation",
    "in_flight",
    "stalled",
    "oldest_request_s",
    "calls",
    "calls_per_s",
    "p50_ms",
    "last_reload",
];

/// The members of `ps --json` that come from the registry.
const OF_ENTRY: [&str; 10] = ["id", "kind", "name", "pid", "cwd", "socket", "started", "command", "log", "audit"];

/// Every instance in `ps --json`, each followed by its backends.
pub(crate) fn in_json(found: &[Found]) -> Vec<Value> {
    found.iter().flat_map(rows_in_json).collect()
}

fn rows_in_json(found: &Found) -> Vec<Value> {
    let nothing = json!({});
    let state = found.state.as_ref().unwrap_or(&nothing);
    let entry = found.entry.to_json();
    let mut row = picked(&entry, &OF_ENTRY);
    put_state(&mut row, state);
    if found.state.is_none() {
        row.insert("state".to_owned(), UNRESPONSIVE.into());
    }
    let backends = state.get("backends").and_then(Value::as_array);
    let below = backends.into_iter().flatten().map(|backend| {
        let State { name, .. } = State::read(backend);
        let mut row = row.clone();
        row.extend(picked(backend, &["name", "command"]));
        row.insert("id".to_owned(), name_below(&found.entry.id, &name).into());
        row.insert("kind".to_owned(), "backend".into());
        put_state(&mut row, backend);
        Value::Object(row)
    });
    let below: Vec<Value> = below.collect();
    if let Some(share) = state.get("share") {
        row.insert("share".to_owned(), share.clone());
    }
    [Value::Object(row)].into_iter().chain(below).collect()
}

/// In a list every kind has the same types: an exit code or null, and a text that says how the child exited.
fn put_state(row: &mut Map<String, Value>, state: &Value) {
    row.extend(picked(state, &OF_STATE));
    let read = State::read(state);
    row.insert("child_pid".to_owned(), read.pid.into());
    row.insert("last_exit".to_owned(), read.last_exit_code().into());
    row.insert("last_exit_text".to_owned(), read.last_exit_text().into());
}

/// These members of an object; null for those that it does not have.
fn picked(object: &Value, members: &[&str]) -> Map<String, Value> {
    members.iter().map(|member| ((*member).to_owned(), object[*member].clone())).collect()
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
        .flat_map(|found| {
            let entry = &found.entry;
            let unresponsive = || State { state: Some(UNRESPONSIVE.to_owned()), ..State::default() };
            let state = found.state.as_ref().map_or_else(unresponsive, State::read);
            let row = |id: String, kind: &str, state: &State| {
                vec![
                    id,
                    kind.to_owned(),
                    state.state.as_deref().unwrap_or(table::NOTHING).to_owned() + state_suffix(state),
                    entry.pid.to_string(),
                    number(state.pid),
                    time(state.uptime_s),
                    number(state.restarts),
                    time(state.next_try_s),
                    state.last_exit_text().unwrap_or(table::NOTHING).to_owned(),
                    from_home(&entry.cwd, home),
                ]
            };
            let below = state.backends.iter().flatten();
            let below = below.map(|backend| row(name_below(&entry.id, &backend.name), "backend", backend));
            let clients = state.share.iter().flat_map(|share| &share.clients).map(|client| {
                let mut cells = vec![table::NOTHING.to_owned(); columns.len()];
                cells[0] = name_below(&entry.id, client.name.as_deref().unwrap_or("client"));
                cells[1] = "client".to_owned();
                cells[2] = "connected".to_owned();
                cells[3] = number(client.pid);
                cells[5] = time(client.since.map(|since| unix_now() - since));
                cells[9] = from_home(Path::new(&client.cwd), home);
                cells
            });
            [row(entry.id.clone(), &entry.kind, &state)].into_iter().chain(below).chain(clients).collect::<Vec<_>>()
        })
        .collect();
    let dress = |title: &str, cell: &str| match (title, cell) {
        ("STATE", "given_up" | "halted") => paint.red(cell),
        ("STATE", cell) if cell.ends_with(RELOAD_FAILED) || cell.ends_with(STALLED) => paint.yellow(cell),
        ("STATE", "backoff" | "limited" | "unresponsive") | ("NEXT", _) if cell != table::NOTHING => paint.yellow(cell),
        ("STATE", "starting" | "started" | "reloading" | "stopping") => paint.cyan(cell),
        ("STATE", "stopped") | (_, table::NOTHING) => paint.dim(cell),
        ("STATE", _) => paint.green(cell),
        _ => cell.to_owned(),
    };
    let lines = table::dressed(&columns, &rows, width, &dress).into_iter().map(|line| line + "\n");
    let states = found.iter().filter_map(|found| Some((&found.entry.id, State::read(found.state.as_ref()?))));
    let notes = states.filter_map(|(id, state)| Some(format!("{id}: {}\n", why_not_shared(&state)?)));
    lines.chain(notes).collect()
}

/// Why a server that was to be shared is not for all clients.
fn why_not_shared(state: &State) -> Option<String> {
    let share = state.share.as_ref()?;
    let why = share.why_not_all.as_ref()?;
    let whom = if share.scope == "equals" { "shared only by clients with equal capabilities" } else { "not shared" };
    Some(format!("{whom}: {why}"))
}

fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

pub(super) fn number(number: Option<u64>) -> String {
    number.map_or_else(|| table::NOTHING.to_owned(), |number| number.to_string())
}

pub(super) fn time(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| table::NOTHING.to_owned(), in_short)
}

fn state_in_words(state: &State, width: Option<usize>) -> String {
    let mut lines: Vec<(&str, String)> = Vec::new();
    let mut say = |title, words: String| {
        if !words.is_empty() {
            lines.push((title, words));
        }
    };
    let word = state.state.as_deref().unwrap_or_default();
    let since = state.uptime_s.map(|uptime| format!(" for {}", in_short(uptime))).unwrap_or_default();
    let pid = state.pid.map(|pid| format!(", pid {pid}")).unwrap_or_default();
    let health = state.health.as_deref().filter(|health| *health != "healthy" && *health != word);
    let health = health.map(|health| format!(", {health}")).unwrap_or_default();
    say("state", format!("{word}{since}{pid}{health}"));
    if let Some(text) = &state.limit {
        let until = match (&state.limited_until_text, state.next_try_s) {
            (Some(until), Some(seconds)) => format!("until {until} (in {})", in_short(seconds)),
            _ => "without a known end".to_owned(),
        };
        say("limited", format!("{until}: {text}"));
    } else if let Some(seconds) = state.next_try_s {
        say("next try", format!("in {}", in_short(seconds)));
    }
    if let Some(failure) = state.failed_reload() {
        let ago = failure.seconds_ago.map(in_short).unwrap_or_default();
        let serves = match (state.kind.as_str(), state.pid) {
            ("gateway", _) => ", the previous configuration stays in force",
            (_, Some(_)) => ", the old server keeps serving",
            (_, None) => "",
        };
        say("reload", format!("failed {ago} ago{serves}: {}", failure.error.replace('\n', " ")));
    }
    if let Some(Restarting { step: Some(step), reason }) = &state.restart {
        say("restart", format!("{step} ({reason})"));
    }
    let crashes = match state.crashes.unwrap_or_default() {
        0 => String::new(),
        1 => ", 1 recent crash".to_owned(),
        crashes => format!(", {crashes} recent crashes"),
    };
    say("restarts", format!("{}{crashes}", state.restarts.unwrap_or_default()));
    if let (Some(columns), Some(rows)) = (state.columns, state.rows) {
        say("terminal", format!("{columns} × {rows}, {} attached", state.attached.unwrap_or_default()));
    }
    let waits = match (state.waiting_for_input, state.stance.as_deref()) {
        (true, Some("dialog")) => "for a choice",
        (true, _) => "for input",
        (false, _) => "",
    };
    say("waiting", waits.to_owned());
    let busy: Vec<String> = [(state.in_flight, "in flight"), (state.held, "held"), (state.draining, "draining")]
        .into_iter()
        .filter_map(|(count, words)| Some((count.filter(|count| *count > 0)?, words)))
        .map(|(count, words)| format!("{count} {words}"))
        .collect();
    let oldest = state.oldest_request_s.map(|age| format!(", the oldest for {}", in_short(age)));
    say("requests", busy.join(", ") + oldest.filter(|_| !busy.is_empty()).as_deref().unwrap_or_default());
    if state.stalled {
        say(
            "stalled",
            "the server does not answer: `outlast restart --now` replaces it and fails its calls".to_owned(),
        );
    }
    if !state.muted.is_empty() {
        say("muted", format!("{} (changed right after each start; no reload for now)", state.muted.join(", ")));
    }
    say("last exit", state.last_exit_text().unwrap_or_default().to_owned());
    if let Some(share) = &state.share {
        let whom = match share.scope.as_str() {
            "directory" => "by clients in this directory",
            "user" => "by clients in any directory",
            _ => "",
        };
        say("shared", why_not_shared(state).unwrap_or_else(|| whom.to_owned()));
        share.clients.iter().for_each(|client| say("client", client_in_words(client)));
    }
    say("name", state.name.clone());
    say("command", state.command.clone());
    let source = state.cwd_source.as_ref().map(|source| format!(" ({source})")).unwrap_or_default();
    say("cwd", format!("{}{source}", state.cwd));
    say("document", state.document.clone());
    say("agent id", state.conversation.clone());
    if !state.env_left_out.is_empty() {
        say("not passed", format!("{}; {}", state.env_left_out.join(", "), environment::HOW_TO_PASS));
    }
    if let Some(pid) = state.outlast_pid {
        say("outlast", format!("pid {pid}"));
    }
    say("listen", state.listen.clone());
    say("page", state.status_page.clone());
    say("log", state.log.clone());
    say("socket", state.socket.clone());
    let mut words = format!("{} ({})\n", state.id, state.kind);
    for (title, line) in lines {
        // A line feed in a name or a path must not begin a line that looks like another value.
        words.push_str(&format!("  {title:9}  {}\n", table::hanging(&visible::cell(&line), 13, width)));
    }
    if let Some(backends) = &state.backends {
        words.push_str(&backends_in_words(backends, width));
    }
    for collision in collisions_in_words(&state.collisions) {
        words.push_str(&format!("  collision  {}\n", visible::cell(&collision)));
    }
    let more = state.collision_count.unwrap_or_default().saturating_sub(state.collisions.len() as u64);
    if more > 0 {
        let names = if more == 1 { "name" } else { "names" };
        words.push_str(&format!("  collision  and {more} more {names}\n"));
    }
    let stderr = redact::text(&state.stderr_tail).into_owned();
    if !stderr.is_empty() {
        let lines: Vec<&str> = stderr.lines().collect();
        let lines = &lines[lines.len().saturating_sub(STDERR_LINES_MAX)..];
        words.push_str(&format!("  stderr\n    {}\n", lines.join("\n    ")));
    }
    words
}

fn client_in_words(client: &Client) -> String {
    let name = client.name.as_deref().unwrap_or("unnamed");
    let version = client.version.as_ref().map(|version| format!(" {version}")).unwrap_or_default();
    let since = client.since.map(|since| format!(" for {}", in_short(unix_now() - since))).unwrap_or_default();
    let parent = client.parent_pid.map(|pid| format!(", started by pid {pid}")).unwrap_or_default();
    format!("{name}{version}{since}, pid {}{parent}", number(client.pid))
}

/// Names that several backends of a gateway offer, one per line, with both owners.
pub(crate) fn collisions_in_words(collisions: &[Collision]) -> Vec<String> {
    let words = |Collision { list, name, offered_by, left_out }: &Collision| match offered_by == left_out {
        true => format!("{list}: `{name}` is listed twice by {offered_by}; only the first counts"),
        false => format!("{list}: `{name}` belongs to {offered_by}; that of {left_out} is left out"),
    };
    collisions.iter().map(words).collect()
}

/// The state of an instance that runs and did not answer in time.
pub(crate) const UNRESPONSIVE: &str = "unresponsive";
/// What `ps` and `top` add to the state of a server whose last reload failed.
pub(crate) const RELOAD_FAILED: &str = ", reload failed";
/// The suffix to the state of a server that does not respond.
pub(crate) const STALLED: &str = ", stalled";

/// Other problems of a server, as a suffix to its state.
fn state_suffix(state: &State) -> &'static str {
    match state.failed_reload() {
        _ if state.stalled => STALLED,
        Some(_) => RELOAD_FAILED,
        None => "",
    }
}

/// The backends of a gateway, one per line.
fn backends_in_words(backends: &[State], width: Option<usize>) -> String {
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
            let stale = if backend.stale { " (stale)" } else { "" };
            vec![
                if backend.name.is_empty() { table::NOTHING.to_owned() } else { backend.name.clone() },
                backend.state.as_deref().unwrap_or(table::NOTHING).to_owned() + state_suffix(backend),
                number(backend.pid),
                time(backend.uptime_s),
                number(backend.tools) + stale,
                number(backend.in_flight),
                number(backend.restarts),
                time(backend.next_try_s),
                backend.last_exit_text().unwrap_or(table::NOTHING).to_owned(),
            ]
        })
        .collect();
    let width = width.map(|width| width.saturating_sub(2));
    table::lines(&columns, &rows, width).into_iter().map(|line| format!("  {line}\n")).collect()
}

/// A duration in short form: `0.4s`, `12s`, `3m`, `5h`, `2d`.
pub(crate) fn in_short(seconds: f64) -> String {
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

pub(crate) fn from_home(path: &Path, home: Option<&Path>) -> String {
    match home.and_then(|home| path.strip_prefix(home).ok()) {
        Some(rest) if rest == Path::new("") => "~".to_owned(),
        Some(rest) => PathBuf::from("~").join(rest).display().to_string(),
        None => path.display().to_string(),
    }
}

pub(crate) fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).expect("a value is always JSON")
}

/// Writes text for people to stdout, all of it. Control characters are removed, except the colours of [`Paint`]. A
/// reader that has closed stdout is no error.
pub(crate) fn print(text: &str) -> Result<ExitCode, Report> {
    write_out(&paint::finish(text))
}

/// Writes JSON for programs to stdout, also as lines. Control characters are escaped.
pub(crate) fn print_json(text: &str) -> Result<ExitCode, Report> {
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
pub(super) mod tests {
    use super::*;
    use outlast_control::registry::Entry;

    pub(in crate::operator) fn entry(id: &str, name: &str, cwd: &str) -> Entry {
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
            program: None,
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
        insta::assert_snapshot!(state_in_words(&State::read(&gateway), Some(100)), @"
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
    fn no_value_of_a_state_looks_like_another() {
        let forged = "x\n  state      ready\nforged";
        let state = json!({"id": "x-1abcd", "kind": "mcp", "name": forged, "state": forged, "cwd": forged, "command": forged,
            "log": forged, "socket": forged, "last_exit": forged, "restart": {"step": forged, "reason": forged}});
        let shown = state_in_words(&State::read(&state), None);
        assert_eq!(shown.lines().filter(|line| line.starts_with("  state ")).count(), 1, "{shown}");
        assert!(!shown.contains("\nforged"), "{shown}");
    }

    #[test]
    fn a_state_shows_the_known_values() {
        let state = json!({
            "id": "weather-1abcd", "kind": "mcp", "name": "weather", "state": "reloading", "pid": 4242,
            "outlast_pid": 4240, "uptime_s": 12.3, "restarts": 3, "crashes": 1, "in_flight": 2, "held": 0, "draining": 1,
            "next_try_s": null, "last_exit": "exit code 1", "command": "python -m weather", "cwd": "/srv/weather",
            "log": "/srv/weather/.outlast/logs/weather-1abcd.log", "socket": "/home/me/x.sock",
            "restart": {"step": "the build is running", "reason": "changed: a.py"},
            "stderr_tail": "Traceback (most recent call last):\nValueError: no",
        });
        insta::assert_snapshot!(state_in_words(&State::read(&state), None), @"
        weather-1abcd (mcp)
          state      reloading for 12s, pid 4242
          restart    the build is running (changed: a.py)
          restarts   3, 1 recent crash
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
        insta::assert_snapshot!(state_in_words(&State::read(&state), None), @"
        weather-1abcd (mcp)
          state      backoff
          next try   in 4.0s
          restarts   1, 4 recent crashes
          outlast    pid 4240
        ");
        let state = json!({"id": "night", "kind": "session", "state": "ready", "uptime_s": 61.0, "pid": 7, "restarts": 0,
            "outlast_pid": 4240, "columns": 101, "rows": 33, "attached": 2, "waiting_for_input": true,
            "stance": "dialog", "conversation": "11111111", "command": "claude"});
        insta::assert_snapshot!(state_in_words(&State::read(&state), None), @"
        night (session)
          state      ready for 1m, pid 7
          restarts   0
          terminal   101 × 33, 2 attached
          waiting    for a choice
          command    claude
          agent id   11111111
          outlast    pid 4240
        ");
        let limited = |until: Value, left: Value| {
            let state = json!({"id": "night", "kind": "session", "state": "limited", "uptime_s": 61.0, "pid": 7,
                "limit": "You've hit your limit", "limited_until_text": until, "next_try_s": left});
            state_in_words(&State::read(&state), None)
        };
        insta::assert_snapshot!(limited(json!("2026-11-18 03:37"), json!(7180.0)), @"
        night (session)
          state      limited for 1m, pid 7
          limited    until 2026-11-18 03:37 (in 1h59m): You've hit your limit
          restarts   0
        ");
        assert!(limited(Value::Null, Value::Null).contains("limited    without a known end: You've hit your limit\n"));
        for (health, words) in [("halted", "state      halted\n"), ("degraded", "state      halted, degraded\n")] {
            let said = state_in_words(
                &State::read(&json!({"id": "s", "kind": "session", "state": "halted", "health": health})),
                None,
            );
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn a_failed_reload_names_the_serving_process() {
        let last = json!({"ok": false, "error": "the new server ended (exit code 1)", "seconds_ago": 4.0});
        let table = [
            (
                json!({"kind": "mcp", "state": "ready", "pid": 7, "uptime_s": 9.0}),
                "ago, the old server keeps serving: the",
            ),
            (json!({"kind": "mcp", "state": "backoff", "next_try_s": 1.0}), "ago: the new server ended"),
            (json!({"kind": "gateway", "state": "running", "uptime_s": 9.0}), "ago, the previous configuration stays"),
        ];
        for (mut state, words) in table {
            state["last_reload"] = last.clone();
            let said = state_in_words(&State::read(&state), None);
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
    fn a_restart_lists_changed_tools() {
        let report = json!({"old_pid": 4242, "new_pid": 4250, "took_ms": 87,
            "tools": {"added": ["sum", "product"], "removed": ["old"], "changed": ["echo"]},
            "draining": "2 calls left on the old server"});
        insta::assert_snapshot!(restarted_in_words("weather-1abcd", &Restarted::read(&report)), @"
        Restarted weather-1abcd in 87 ms: pid 4242 → 4250
          tools added:   sum, product
          tools removed: old
          tools changed: echo
          2 calls left on the old server
        ");
        let report = json!({"old_pid": null, "new_pid": 4250, "took_ms": 87, "tools": {"added": []}});
        insta::assert_snapshot!(restarted_in_words("weather-1abcd", &Restarted::read(&report)), @"
        Restarted weather-1abcd in 87 ms: pid 4250
          its tools are unchanged
        ");
        let report = json!({"old_pid": null, "new_pid": null, "took_ms": 87});
        insta::assert_snapshot!(restarted_in_words("tools-1abcd/far", &Restarted::read(&report)), @"Restarted tools-1abcd/far in 87 ms");
        let report = json!({"old_pid": 1, "new_pid": 2, "took_ms": 3, "tools": {"compared": false}});
        insta::assert_snapshot!(restarted_in_words("weather-1abcd", &Restarted::read(&report)), @"Restarted weather-1abcd in 3 ms: pid 1 → 2");
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
