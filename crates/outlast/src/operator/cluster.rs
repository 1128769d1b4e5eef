//! The commands with `--cluster`: they ask one gateway of this user, which answers for all replicas of its cluster. The
//! replicas are not contacted from here.

use std::{collections::BTreeMap, env, path::Path, process::ExitCode};

use outlast_control::{
    answer::{Restarted, State},
    client::{self, Found},
    cluster::{ClusterAnswer, ClusterState, PlacedBackend, Replica, SwitchedOff},
    find::{self, ANSWER_MAX, SURVEY_MAX, registry},
    method::{Method, Restart},
    registry::Entry,
};
use outlast_core::count::{count, one_of};
use serde_json::{Value, json};

use super::{
    instances::{self, Target, UNRESPONSIVE, in_short, number, pretty, print, print_json, time},
    top::board::{OfCluster, Row},
};
use crate::cli::{
    self,
    paint::Paint,
    report::{self, Report},
    table::{self, Column, Yield},
};

mod audit;

pub(crate) use self::audit::audit;
#[cfg(test)]
pub(crate) use self::tests::example;

/// The state of a replica that is registered no more.
const LOST: &str = "lost";
/// The state of a backend that no replica runs.
const NO_OWNER: &str = "no owner";

pub(crate) fn ps(arguments: &cli::Ps) -> Result<ExitCode, Report> {
    let (_, state, _) = ask_state(arguments.id.as_deref())?;
    warn(&state.unreachable);
    if arguments.json {
        return print_json(&format!("{}\n", pretty(&in_json(&state))));
    }
    print(&ps_in_words(&state, table::room(), Paint::stdout()))
}

pub(crate) fn state(which: &cli::Which) -> Result<ExitCode, Report> {
    let (_, state, raw) = ask_state(which.id.as_deref())?;
    warn(&state.unreachable);
    if which.json {
        return print_json(&format!("{}\n", pretty(&raw)));
    }
    print(&state_in_words(&state, table::room()))
}

/// Without a terminal, or once: the table of `ps`.
pub(crate) fn top_once(arguments: &cli::Top) -> Result<ExitCode, Report> {
    ps(&cli::Ps { id: arguments.id.clone(), json: arguments.json, cluster: true })
}

pub(crate) fn restart(arguments: &cli::Restart) -> Result<ExitCode, Report> {
    let which = &arguments.which;
    for (is_given, option) in
        [(arguments.now, "--now"), (arguments.fresh, "--fresh"), (arguments.r#continue, "--continue")]
    {
        if is_given {
            let sentence = format!("`{option}` cannot be used together with `--cluster`");
            return Err(
                Report::new(report::USAGE, sentence).hint(format!("a cluster has only gateways: remove `{option}`"))
            );
        }
    }
    let target = find_backend(which.id.as_deref())?;
    let reason = arguments.reason.clone().unwrap_or_else(|| "requested on the command line".to_owned());
    let restart = Method::Restart(Restart { reason: Some(reason), cluster: true, ..Restart::default() });
    // No deadline: handshakes have their own limits, and the user can interrupt the command.
    let raw = target.ask(&restart, None)?;
    let answer = ClusterAnswer::read(&raw);
    warn(&answer.unreachable);
    let has_failed = answer.replicas.is_empty() || answer.replicas.iter().any(|one| one.error.is_some());
    match which.json {
        true => print_json(&format!("{}\n", pretty(&raw)))?,
        false => print(&restarted_in_words(&answer, target.backend.as_deref()))?,
    };
    Ok(ExitCode::from(if has_failed { report::FAILURE } else { 0 }))
}

fn restarted_in_words(answer: &ClusterAnswer, backend: Option<&str>) -> String {
    if answer.replicas.is_empty() {
        return "No replica answered\n".to_owned();
    }
    let words = answer.replicas.iter().map(|one| {
        let id = match backend {
            Some(backend) => format!("{}/{backend}", one.replica),
            None => one.replica.clone(),
        };
        match &one.error {
            Some(why) => format!("{id} was not restarted: {why}\n"),
            None => instances::restarted_in_words(&id, &Restarted::read(&one.answer)),
        }
    });
    words.collect()
}

/// Sends a restart of a backend in the whole cluster and returns the result as one line, for `outlast top`.
pub(crate) fn restart_line(target: &Target, method: &Method) -> Result<String, String> {
    let backend = target.backend.as_deref().unwrap_or_default();
    let raw = target.ask_plainly(method, None).map_err(|error| format!("the restart of {backend} failed: {error}"))?;
    let answer = ClusterAnswer::read(&raw);
    let failed =
        answer.replicas.iter().find_map(|one| Some(format!("{}/{backend}: {}", one.replica, one.error.as_ref()?)));
    match failed {
        Some(why) => Err(why),
        None if answer.replicas.is_empty() => Err(format!("{backend}: no replica answered")),
        None => Ok(format!("restarted {backend} on {}", count(answer.replicas.len(), "replica", "replicas"))),
    }
}

// ---- the gateway that answers --------------------------------------------------------------------------------

/// A gateway of this user in a cluster, as the id says, and the cluster's state from it.
pub(crate) fn ask_state(wanted: Option<&str>) -> Result<(Entry, ClusterState, Value), Report> {
    let entry = find_gateway(wanted)?;
    let raw = instances::ask(&entry, &Method::ClusterState, Some(ANSWER_MAX))?;
    let state = ClusterState::read(&raw);
    Ok((entry, state, raw))
}

pub(crate) fn find_gateway(wanted: Option<&str>) -> Result<Entry, Report> {
    let found = client::survey(&registry()?, SURVEY_MAX);
    choose(wanted, &found, &env::current_dir().unwrap_or_default()).map(|found| found.entry.clone())
}

/// A backend by its name, or as `GATEWAY/BACKEND`; or all of a gateway.
fn find_backend(wanted: Option<&str>) -> Result<Target, Report> {
    let found = client::survey(&registry()?, SURVEY_MAX);
    let cwd = env::current_dir().unwrap_or_default();
    let (entry, backend) = choose_backend(wanted, &found, &cwd)?;
    Ok(Target { entry: entry.clone(), backend })
}

fn choose_backend<'a>(
    wanted: Option<&str>,
    found: &'a [Found],
    cwd: &Path,
) -> Result<(&'a Entry, Option<String>), Report> {
    if let Some((gateway, backend)) = wanted.and_then(|wanted| wanted.split_once('/')) {
        return Ok((&choose(Some(gateway), found, cwd)?.entry, Some(backend.to_owned())));
    }
    let has_it = |found: &&Found| wanted.is_some_and(|wanted| find::backends_of(found).any(|name| name == wanted));
    let owners: Vec<&Found> = found.iter().filter(|found| cluster_of(found).is_some()).filter(has_it).collect();
    if owners.is_empty() {
        return Ok((&choose(wanted, found, cwd)?.entry, None));
    }
    Ok((&choose_among(&owners, cwd)?.entry, wanted.map(str::to_owned)))
}

/// By id or name; without one, a gateway of the only cluster.
fn choose<'a>(wanted: Option<&str>, found: &'a [Found], cwd: &Path) -> Result<&'a Found, Report> {
    if wanted.is_none() {
        let members: Vec<&Found> = found.iter().filter(|found| cluster_of(found).is_some()).collect();
        return match members.is_empty() {
            true => Err(no_cluster(found)),
            false => choose_among(&members, cwd),
        };
    }
    let entries: Vec<Entry> = found.iter().map(|found| found.entry.clone()).collect();
    let id = &find::choose(wanted, &entries, &[], cwd)?.id;
    let one = found.iter().find(|found| found.entry.id == *id);
    one.filter(|found| cluster_of(found).is_some()).ok_or_else(|| {
        if one.is_some_and(|found| found.state.is_none()) {
            return Report::new(report::FAILURE, format!("`{id}` does not answer"))
                .hint("`outlast ps` shows the instances that do");
        }
        Report::new(report::FAILURE, format!("`{id}` is not in a cluster")).hint(HOW_TO_JOIN)
    })
}

const HOW_TO_JOIN: &str = "the table `[cluster]` in a gateway's configuration puts it into one";

fn cluster_of(found: &Found) -> Option<String> {
    Some(State::read(found.state.as_ref()?).cluster?.name)
}

fn no_cluster(found: &[Found]) -> Report {
    let silent: Vec<String> = found
        .iter()
        .filter(|found| found.state.is_none() && found.entry.kind == "gateway")
        .map(|found| found.entry.id.clone())
        .collect();
    let report = Report::new(report::FAILURE, "no gateway of this user is in a cluster").hint(HOW_TO_JOIN);
    match silent.is_empty() {
        true => report,
        false => report.because(format!("{} did not answer, and may be in one", one_of(&silent, "and"))),
    }
}

/// All of one cluster are equal; the one in this directory is asked if there is one. `members` is not empty.
fn choose_among<'a>(members: &[&'a Found], cwd: &Path) -> Result<&'a Found, Report> {
    let mut clusters: BTreeMap<String, &'a Found> = BTreeMap::new();
    for found in members {
        let name = cluster_of(found).unwrap_or_default();
        if found.entry.cwd == cwd {
            clusters.insert(name, found);
        } else {
            clusters.entry(name).or_insert(found);
        }
    }
    if clusters.len() > 1 {
        let lines: Vec<String> = clusters.iter().map(|(name, found)| format!("{}  {name}", found.entry.id)).collect();
        let sentence = format!("gateways of this user are in {} clusters", clusters.len());
        return Err(Report::new(report::FAILURE, sentence)
            .because(lines.join("\n"))
            .hint("name one of these ids after the command"));
    }
    clusters.into_values().next().ok_or_else(|| no_cluster(&[]))
}

/// On stderr; the exit code stays 0.
fn warn(unreachable: &[String]) {
    if let Some(words) = warning(unreachable) {
        eprintln!("{}", outlast_core::visible::text(&words));
    }
}

fn warning(unreachable: &[String]) -> Option<String> {
    let (replicas, know) = match unreachable.len() {
        0 => return None,
        1 => ("1 replica".to_owned(), "it"),
        several => (count(several, "replica", "replicas"), "them"),
    };
    let names = one_of(unreachable, "and");
    Some(format!("warning: {replicas} did not answer in time: {names}\n  hint: what is shown of {know} may be old"))
}

// ---- texts ---------------------------------------------------------------------------------------------------

/// The state of a replica in one word.
pub(crate) fn word_of(state: &ClusterState, replica: &Replica) -> &'static str {
    match (replica.is_alive, state.unreachable.contains(&replica.name)) {
        (false, _) => LOST,
        (true, true) => UNRESPONSIVE,
        (true, false) => "running",
    }
}

/// Each replica followed by its backends, then the backends that no replica runs.
pub(crate) fn rows(state: &ClusterState) -> Vec<ClusterRow<'_>> {
    let mut rows = Vec::new();
    for replica in &state.replicas {
        rows.push(ClusterRow::Replica(replica));
        let here = |backend: &&PlacedBackend| backend.replica.as_deref() == Some(&replica.name);
        rows.extend(state.backends.iter().filter(here).map(ClusterRow::Backend));
    }
    let is_listed = |name: &str| state.replicas.iter().any(|replica| replica.name == name);
    let elsewhere = state.backends.iter().filter(|backend| !backend.replica.as_deref().is_some_and(is_listed));
    rows.extend(elsewhere.map(ClusterRow::Backend));
    rows
}

#[derive(Clone, Copy)]
pub(crate) enum ClusterRow<'a> {
    Replica(&'a Replica),
    Backend(&'a PlacedBackend),
}

impl<'a> ClusterRow<'a> {
    pub(crate) fn replica(self) -> Option<&'a str> {
        match self {
            ClusterRow::Replica(replica) => Some(&replica.name),
            ClusterRow::Backend(backend) => backend.replica.as_deref(),
        }
    }

    /// Of a backend; without a state it has no owner.
    pub(crate) fn word(self, state: &ClusterState) -> String {
        match self {
            ClusterRow::Replica(replica) => word_of(state, replica).to_owned(),
            ClusterRow::Backend(backend) => match (&backend.state, backend.placement.as_str()) {
                (Some(word), _) => word.clone(),
                (None, "one") if backend.owner.is_none() => NO_OWNER.to_owned(),
                (None, _) => table::NOTHING.to_owned(),
            },
        }
    }
}

/// The rows of `top --cluster`.
pub(crate) fn board_rows(state: &ClusterState) -> Vec<Row> {
    let row = |row: ClusterRow<'_>| {
        let replica = row.replica().unwrap_or(table::NOTHING);
        let word = row.word(state);
        match row {
            ClusterRow::Replica(one) => Row {
                id: replica.to_owned(),
                kind: "gateway".to_owned(),
                state: word,
                uptime_s: one.uptime_s,
                of_cluster: Some(OfCluster {
                    sessions: sessions_in_words(one),
                    share: share_in_words(one.share_parts),
                    backlog: one.audit_backlog,
                    facts: vec![
                        ("address", one.address.clone().unwrap_or_else(|| table::NOTHING.to_owned())),
                        ("version", one.version.clone()),
                        ("process", one.instance.clone()),
                        ("streams", format!("{}, {} unacked", number(one.streams), bytes_in_words(one.unacked_bytes))),
                        ("nats", if one.is_self { nats_in_words(state) } else { String::new() }),
                    ]
                    .into_iter()
                    .filter(|(_, words): &(&str, String)| !words.is_empty())
                    .collect(),
                    ..OfCluster::default()
                }),
                ..Row::default()
            },
            ClusterRow::Backend(one) => Row {
                id: format!("{replica}/{}", one.name),
                kind: "backend".to_owned(),
                state: word,
                pid: one.pid,
                uptime_s: one.uptime_s,
                restarts: one.restarts,
                of_cluster: Some(OfCluster {
                    backend: Some(one.name.clone()),
                    placement: one.placement.clone(),
                    lease_s: one.lease_until_s,
                    facts: vec![
                        ("backend", one.name.clone()),
                        ("owner", one.owner.clone().unwrap_or_else(|| table::NOTHING.to_owned())),
                    ],
                    ..OfCluster::default()
                }),
                ..Row::default()
            },
        }
    };
    rows(state).into_iter().map(row).collect()
}

/// The members that every row of `ps --cluster --json` has: null where they do not apply.
fn in_json(state: &ClusterState) -> Value {
    let row = |row: ClusterRow<'_>| {
        let word = row.word(state);
        match row {
            ClusterRow::Replica(one) => json!({
                "cluster": state.name, "replica": one.name, "kind": "gateway", "name": state.name, "state": word,
                "instance": one.instance, "version": one.version, "address": one.address, "started": one.started,
                "is_self": one.is_self, "uptime_s": one.uptime_s, "pid": null, "placement": null, "owner": null,
                "lease_until_s": null, "restarts": null, "sessions": one.sessions,
                "sessions_local_only": one.sessions_local_only, "streams": one.streams,
                "unacked_bytes": one.unacked_bytes, "share_parts": one.share_parts, "audit_backlog": one.audit_backlog,
            }),
            ClusterRow::Backend(one) => json!({
                "cluster": state.name, "replica": one.replica, "kind": "backend", "name": one.name,
                "state": one.state.as_deref().or((word == NO_OWNER).then_some("no_owner")), "instance": null,
                "version": null, "address": null, "started": null, "is_self": null, "uptime_s": one.uptime_s,
                "pid": one.pid, "placement": one.placement, "owner": one.owner, "lease_until_s": one.lease_until_s,
                "restarts": one.restarts, "sessions": null, "sessions_local_only": null, "streams": null,
                "unacked_bytes": null, "share_parts": null, "audit_backlog": null,
            }),
        }
    };
    rows(state).into_iter().map(row).collect()
}

fn ps_in_words(state: &ClusterState, width: Option<usize>, paint: Paint) -> String {
    let column = |title, is_number, yields| Column { title, is_number, yields };
    let columns = [
        column("REPLICA", false, Yield::Last(12)),
        column("NAME", false, Yield::Last(12)),
        column("KIND", false, Yield::Soon(1)),
        column("STATE", false, Yield::End(12, 12)),
        column("PLACEMENT", false, Yield::Soon(3)),
        column("LEASE", true, Yield::Late(1)),
        column("PID", true, Yield::Soon(4)),
        column("UPTIME", true, Yield::Last(6)),
        column("RESTARTS", true, Yield::Soon(2)),
        column("SESSIONS", true, Yield::Late(3)),
        column("SHARE", true, Yield::Late(2)),
        column("BACKLOG", true, Yield::Late(4)),
        column("ADDRESS", false, Yield::Beginning(16, 8)),
    ];
    let nothing = || table::NOTHING.to_owned();
    let cells = |row: ClusterRow<'_>| {
        let replica = row.replica().unwrap_or(table::NOTHING).to_owned();
        let word = row.word(state);
        match row {
            ClusterRow::Replica(one) => vec![
                if one.is_self { format!("{replica} *") } else { replica },
                state.name.clone(),
                "gateway".to_owned(),
                word,
                nothing(),
                nothing(),
                nothing(),
                time(one.uptime_s),
                nothing(),
                sessions_in_words(one),
                share_in_words(one.share_parts),
                number(one.audit_backlog),
                one.address.clone().unwrap_or_else(nothing),
            ],
            ClusterRow::Backend(one) => vec![
                replica,
                one.name.clone(),
                "backend".to_owned(),
                word,
                one.placement.clone(),
                time(one.lease_until_s),
                number(one.pid),
                time(one.uptime_s),
                number(one.restarts),
                nothing(),
                nothing(),
                nothing(),
                nothing(),
            ],
        }
    };
    let rows: Vec<Vec<String>> = rows(state).into_iter().map(cells).collect();
    let dress = |title: &str, cell: &str| match (title, cell) {
        ("STATE", "given_up" | LOST | NO_OWNER) => paint.red(cell),
        ("STATE", "backoff" | UNRESPONSIVE) => paint.yellow(cell),
        ("STATE", "starting" | "stopping") => paint.cyan(cell),
        (_, table::NOTHING) => paint.dim(cell),
        ("STATE", _) => paint.green(cell),
        _ => cell.to_owned(),
    };
    let lines = table::dressed(&columns, &rows, width, &dress).into_iter().map(|line| line + "\n");
    lines.chain(nats_problem(state).map(|why| format!("{why}\n"))).collect()
}

/// What the replica that reports cannot know.
fn nats_problem(state: &ClusterState) -> Option<String> {
    if state.nats.connected {
        return None;
    }
    let since = state.nats.since_s.map(|since| format!(" for {}", in_short(since))).unwrap_or_default();
    let why = state.nats.why.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
    let replica = &state.replica;
    Some(format!("{replica} has not been connected to NATS{since}{why}: it shows what it knew of the others"))
}

fn nats_in_words(state: &ClusterState) -> String {
    let nats = &state.nats;
    let since = nats.since_s.map(|since| format!(" for {}", in_short(since))).unwrap_or_default();
    if nats.connected {
        let server = nats.server.as_ref().map(|server| format!(" to {server}")).unwrap_or_default();
        let missing = match nats.watches_down.is_empty() {
            true => String::new(),
            false => format!(", which does not report changes of {}", nats.watches_down.join(", ")),
        };
        return format!("connected{server}{since}{missing}");
    }
    let why = nats.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    format!("not connected{since}{why}")
}

fn sessions_in_words(replica: &Replica) -> String {
    match (replica.sessions, replica.sessions_local_only) {
        (Some(sessions), Some(local @ 1..)) => format!("{sessions} ({local} local)"),
        (sessions, _) => number(sessions),
    }
}

/// In percent of all rate budgets.
pub(crate) fn share_in_words(parts: Option<u32>) -> String {
    parts.map_or_else(|| table::NOTHING.to_owned(), |parts| format!("{:.1}%", f64::from(parts) / 10_000.0))
}

pub(crate) fn bytes_in_words(bytes: Option<u64>) -> String {
    match bytes {
        None => table::NOTHING.to_owned(),
        Some(bytes @ 0..1024) => format!("{bytes}B"),
        Some(bytes @ 1024..1_048_576) => format!("{:.1}KiB", bytes as f64 / 1024.0),
        Some(bytes) => format!("{:.1}MiB", bytes as f64 / 1_048_576.0),
    }
}

fn state_in_words(state: &ClusterState, width: Option<usize>) -> String {
    let mut words = format!("{} (cluster), seen by {}\n", state.name, state.replica);
    let mut say = |title: &str, line: String| {
        if !line.is_empty() {
            words.push_str(&format!("  {title:9}  {}\n", table::hanging(&line, 13, width)));
        }
    };
    say("nats", nats_in_words(state));
    let off = |one: &SwitchedOff| match (&one.tool, &one.backend) {
        (Some(tool), _) => Some(format!("tool {tool}")),
        (None, Some(backend)) => Some(format!("backend {backend}")),
        (None, None) => None,
    };
    say("off", state.switches.iter().filter_map(off).collect::<Vec<_>>().join(", "));
    let counters = &state.counters;
    let counted = [
        (counters.takeovers, "takeover", "takeovers"),
        (counters.calls_lost, "call lost", "calls lost"),
        (counters.late_messages, "late message", "late messages"),
        (counters.duplicates, "duplicate packet", "duplicate packets"),
        (counters.resent, "packet sent again", "packets sent again"),
        (counters.watches_lost, "watch lost", "watches lost"),
    ];
    let counted = counted.into_iter().filter(|(number, ..)| *number > 0);
    say("counted", counted.map(|(number, one, many)| count(number, one, many)).collect::<Vec<_>>().join(", "));
    say("silent", state.unreachable.join(", "));
    words.push_str(&replicas_in_words(state, width));
    words.push_str(&backends_in_words(&state.backends, width));
    words
}

fn indented(columns: &[Column], rows: &[Vec<String>], width: Option<usize>) -> String {
    let width = width.map(|width| width.saturating_sub(2));
    table::lines(columns, rows, width).into_iter().map(|line| format!("  {line}\n")).collect()
}

fn replicas_in_words(state: &ClusterState, width: Option<usize>) -> String {
    let column = |title, is_number, yields| Column { title, is_number, yields };
    let columns = [
        column("REPLICA", false, Yield::Last(10)),
        column("STATE", false, Yield::End(12, 12)),
        column("VERSION", false, Yield::Soon(2)),
        column("UPTIME", true, Yield::Last(6)),
        column("SESSIONS", true, Yield::Last(8)),
        column("STREAMS", true, Yield::Soon(4)),
        column("UNACKED", true, Yield::Soon(3)),
        column("SHARE", true, Yield::Late(1)),
        column("BACKLOG", true, Yield::Late(2)),
        column("INSTANCE", false, Yield::Soon(1)),
        column("ADDRESS", false, Yield::Beginning(16, 8)),
    ];
    let cells = |one: &Replica| {
        vec![
            if one.is_self { format!("{} *", one.name) } else { one.name.clone() },
            word_of(state, one).to_owned(),
            one.version.clone(),
            time(one.uptime_s),
            sessions_in_words(one),
            number(one.streams),
            bytes_in_words(one.unacked_bytes),
            share_in_words(one.share_parts),
            number(one.audit_backlog),
            one.instance.clone(),
            one.address.clone().unwrap_or_else(|| table::NOTHING.to_owned()),
        ]
    };
    indented(&columns, &state.replicas.iter().map(cells).collect::<Vec<_>>(), width)
}

fn backends_in_words(backends: &[PlacedBackend], width: Option<usize>) -> String {
    if backends.is_empty() {
        return "  backends   none\n".to_owned();
    }
    let column = |title, is_number, yields| Column { title, is_number, yields };
    let columns = [
        column("BACKEND", false, Yield::Last(10)),
        column("PLACEMENT", false, Yield::Soon(2)),
        column("REPLICA", false, Yield::Last(10)),
        column("STATE", false, Yield::End(12, 12)),
        column("OWNER", false, Yield::Late(2)),
        column("LEASE", true, Yield::Late(1)),
        column("PID", true, Yield::Soon(3)),
        column("UPTIME", true, Yield::Soon(4)),
        column("RESTARTS", true, Yield::Soon(1)),
    ];
    let nothing = || table::NOTHING.to_owned();
    let cells = |one: &PlacedBackend| {
        vec![
            one.name.clone(),
            one.placement.clone(),
            one.replica.clone().unwrap_or_else(nothing),
            ClusterRow::Backend(one).word(&ClusterState::default()),
            one.owner.clone().unwrap_or_else(nothing),
            time(one.lease_until_s),
            number(one.pid),
            time(one.uptime_s),
            number(one.restarts),
        ]
    };
    indented(&columns, &backends.iter().map(cells).collect::<Vec<_>>(), width)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn example() -> ClusterState {
        let replica = |name: &str, is_self: bool| Replica {
            name: name.into(),
            instance: format!("00000000000000{}", &name[name.len() - 2..]).replace('-', "0"),
            version: "0.1.0".into(),
            address: Some(format!("http://{name}.example:8300/mcp")),
            started: Some(0.0),
            is_self,
            is_alive: true,
            uptime_s: Some(7384.0),
            sessions: Some(12),
            sessions_local_only: Some(0),
            streams: Some(3),
            unacked_bytes: Some(2048),
            share_parts: Some(333_333),
            audit_backlog: Some(0),
        };
        let backend = |name: &str, placement: &str, at: Option<&str>| PlacedBackend {
            name: name.into(),
            placement: placement.into(),
            state: at.map(|_| "ready".into()),
            pid: at.map(|_| 4242),
            replica: at.map(Into::into),
            uptime_s: at.map(|_| 61.0),
            restarts: at.map(|_| 1),
            ..PlacedBackend::default()
        };
        ClusterState {
            name: "prod".into(),
            replica: "east-1".into(),
            instance: "0000000000000001".into(),
            nats: outlast_control::cluster::Nats {
                connected: true,
                server: Some("nats://10.0.0.1:4222".into()),
                since_s: Some(7380.0),
                why: None,
                watches_down: Vec::new(),
            },
            replicas: vec![
                Replica { sessions_local_only: Some(2), ..replica("east-1", true) },
                Replica { audit_backlog: Some(14), ..replica("east-2", false) },
                Replica {
                    is_alive: false,
                    uptime_s: None,
                    sessions: None,
                    sessions_local_only: None,
                    streams: None,
                    unacked_bytes: None,
                    share_parts: None,
                    audit_backlog: None,
                    ..replica("west-1", false)
                },
            ],
            backends: vec![
                PlacedBackend {
                    owner: Some("east-2".into()),
                    lease_until_s: Some(8.4),
                    ..backend("ledger", "one", Some("east-2"))
                },
                backend("files", "every", Some("east-1")),
                backend("files", "every", Some("east-2")),
                backend("mail", "one", None),
            ],
            switches: vec![
                SwitchedOff { tool: Some("files__rm".into()), backend: None },
                SwitchedOff { tool: None, backend: Some("docs".into()) },
            ],
            counters: outlast_control::cluster::Counters { takeovers: 1, resent: 7, ..Default::default() },
            unreachable: vec!["east-2".into()],
        }
    }

    #[test]
    fn a_bucket_that_is_not_watched_is_named() {
        let mut state = example();
        assert_eq!(nats_in_words(&state), "connected to nats://10.0.0.1:4222 for 2h03m");
        state.nats.watches_down = vec!["leases".into(), "state".into()];
        let words = "connected to nats://10.0.0.1:4222 for 2h03m, which does not report changes of leases, state";
        assert_eq!(nats_in_words(&state), words);
    }

    #[test]
    fn ps_lists_every_replica_with_its_backends() {
        let state = example();
        insta::assert_snapshot!(ps_in_words(&state, Some(160), Paint::plain()));
        insta::assert_snapshot!(ps_in_words(&state, Some(80), Paint::plain()));
        for width in [40, 60, 80, 100, 160] {
            let said = ps_in_words(&state, Some(width), Paint::plain());
            assert!(said.lines().all(|line| line.chars().count() <= width), "{width}\n{said}");
        }
        let lost = outlast_control::cluster::Nats {
            connected: false,
            since_s: Some(4.0),
            why: Some("connection refused".into()),
            ..Default::default()
        };
        let said = ps_in_words(&ClusterState { nats: lost, ..state }, None, Paint::plain());
        let words =
            "east-1 has not been connected to NATS for 4.0s (connection refused): it shows what it knew of the others";
        assert_eq!(said.lines().last(), Some(words));
    }

    #[test]
    fn every_row_has_the_same_members_in_json() {
        let rows = in_json(&example());
        let rows = rows.as_array().unwrap();
        let members = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert!(rows.iter().all(|row| members(row) == members(&rows[0])));
        let told: Vec<(&str, &str, &str, &str)> = rows
            .iter()
            .map(|row| {
                let text = |member: &str| row[member].as_str().unwrap_or("null");
                (text("replica"), text("kind"), text("name"), text("state"))
            })
            .collect();
        let expected = [
            ("east-1", "gateway", "prod", "running"),
            ("east-1", "backend", "files", "ready"),
            ("east-2", "gateway", "prod", "unresponsive"),
            ("east-2", "backend", "ledger", "ready"),
            ("east-2", "backend", "files", "ready"),
            ("west-1", "gateway", "prod", "lost"),
            ("null", "backend", "mail", "no_owner"),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn a_state_shows_replicas_backends_and_counts() {
        insta::assert_snapshot!(state_in_words(&example(), Some(140)));
        let empty = ClusterState { name: "prod".into(), replica: "east-1".into(), ..ClusterState::default() };
        insta::assert_snapshot!(state_in_words(&empty, None));
    }

    #[test]
    fn a_restart_reports_each_replica() {
        let answer = ClusterAnswer::read(&json!({
            "replicas": [
                {"replica": "east-1", "answer": {"old_pid": 1, "new_pid": 2, "took_ms": 87}},
                {"replica": "east-2", "error": "files did not start: exit code 1"},
            ],
            "unreachable": ["west-1"],
        }));
        insta::assert_snapshot!(restarted_in_words(&answer, Some("files")), @r"
        Restarted east-1/files in 87 ms: pid 1 → 2
        east-2/files was not restarted: files did not start: exit code 1
        ");
        let all = ClusterAnswer::read(&json!({"replicas": [{"replica": "east-1", "answer": {"backends": [
            {"name": "files", "old_pid": 1, "new_pid": 2, "took_ms": 8},
            {"name": "ledger", "old_pid": 3, "new_pid": 4, "took_ms": 8},
        ]}}]}));
        insta::assert_snapshot!(restarted_in_words(&all, None), @r"
        Restarted east-1/files in 8 ms: pid 1 → 2
        Restarted east-1/ledger in 8 ms: pid 3 → 4
        ");
        assert_eq!(restarted_in_words(&ClusterAnswer::default(), None), "No replica answered\n");
        insta::assert_snapshot!(warning(&answer.unreachable).unwrap(), @r"
        warning: 1 replica did not answer in time: `west-1`
          hint: what is shown of it may be old
        ");
        assert_eq!(warning(&[]), None);
    }

    #[test]
    fn a_gateway_in_a_cluster_is_found() {
        let found = |id: &str, kind: &str, cwd: &str, cluster: Option<&str>| {
            let cluster = cluster.map(|name| json!({"name": name, "replica": id}));
            let entry = Entry { kind: kind.into(), ..instances::tests::entry(id, "tools", cwd) };
            Found { entry, state: Some(json!({"cluster": cluster, "backends": [{"name": "files"}, {"name": id}]})) }
        };
        let silent = |id: &str| Found {
            entry: Entry { kind: "gateway".into(), ..instances::tests::entry(id, "tools", "/srv") },
            state: None,
        };
        let two = [
            found("weather-1", "mcp", "/srv/a", None),
            found("tools-1", "gateway", "/srv/a", Some("prod")),
            found("tools-2", "gateway", "/srv/b", Some("prod")),
        ];
        let id = |wanted, cwd| choose(wanted, &two, Path::new(cwd)).map(|found| found.entry.id.as_str());
        assert_eq!(id(None, "/"), Ok("tools-1"));
        assert_eq!(id(None, "/srv/b"), Ok("tools-2"), "the one in this directory");
        assert_eq!(id(Some("tools-2"), "/srv/a"), Ok("tools-2"));
        let backend = |wanted| {
            choose_backend(wanted, &two, Path::new("/srv/b")).map(|(entry, backend)| (entry.id.as_str(), backend))
        };
        assert_eq!(backend(None), Ok(("tools-2", None)));
        assert_eq!(backend(Some("files")), Ok(("tools-2", Some("files".to_owned()))));
        assert_eq!(backend(Some("tools-1/files")), Ok(("tools-1", Some("files".to_owned()))));
        let several = [
            found("tools-1", "gateway", "/srv/a", Some("prod")),
            found("tools-2", "gateway", "/srv/b", Some("test")),
            found("tools-3", "gateway", "/srv/c", Some("test")),
        ];
        let mut words = String::new();
        let mut say = |wanted: Option<&str>, found: &[Found]| {
            words.push_str(&choose(wanted, found, Path::new("/")).err().map(|error| error.to_string()).unwrap());
        };
        say(None, &[]);
        say(None, &two[..1]);
        say(None, &[silent("tools-4")]);
        say(None, &several);
        say(Some("weather-1"), &two);
        say(Some("tools-4"), &[silent("tools-4")]);
        say(Some("nonsense"), &two);
        insta::assert_snapshot!(words);
        assert!(choose_backend(Some("files"), &several, Path::new("/")).is_err(), "two clusters have it");
    }
}
