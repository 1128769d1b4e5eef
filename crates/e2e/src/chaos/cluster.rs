//! Faults on a cluster: three NATS servers, three gateways and clients that send each request to another gateway, while
//! processes are killed and stopped, the network is partitioned, and disks are full.

mod client;
mod faults;
mod nats;
mod network;
mod plan;
mod proxy;
mod recovery;
mod team;

use std::{
    collections::{BTreeMap, HashSet},
    env, fs,
    path::PathBuf,
    sync::{Arc, Mutex, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::Value;

use super::{
    Options,
    ledger::{HUNG_AFTER, Ledger, read_executions},
    print_calls, processes,
    random::Random,
    start_guard,
    world::Programs,
};
use client::{Client, Seen};
use plan::{Kind, Plan, Target};
use team::{REPLICAS, TWO_AT_ONCE, Team, lock_of};

/// The directory with the NATS server.
const PEERS: &str = "OUTLAST_PEERS";
/// Clients with a session that lasts for the whole run.
const SESSIONS: usize = 8;
const STATELESS: usize = 2;
/// A run of this length also measures how long the cluster takes to recover from each kind of fault.
const LONG_RUN: Duration = Duration::from_secs(120);
/// Sessions that were opened while there were faults, and are checked at the end.
const VISITORS_MAX: usize = 40;

/// How often each fault was carried out, and how often its target did not exist.
type Applied = BTreeMap<(Target, Kind), (u64, u64)>;

/// False if a promise was broken.
pub(super) fn run(options: &Options) -> Result<bool, String> {
    let peers = env::var_os(PEERS).filter(|value| !value.is_empty());
    let peers = peers.ok_or("OUTLAST_PEERS is not set: `cargo xtask chaos --cluster` sets it")?;
    let nats = PathBuf::from(peers).join("nats/bin/nats-server");
    let only = options.only.as_deref();
    if only.is_some_and(|only| Target::ALL.iter().all(|target| target.name() != only)) {
        let names = Target::ALL.map(Target::name).join(", ");
        return Err(format!("`--only` needs one of {names}"));
    }
    let programs = Programs::find(options.outlast.clone())?;
    // A process that escapes from its parents becomes a child of this program, and is found.
    nix::sys::prctl::set_child_subreaper(true).map_err(|error| error.to_string())?;
    let scratch = tempfile::Builder::new().prefix("outlast-chaos-").tempdir().map_err(|error| error.to_string())?;
    let scratch = scratch.keep().canonicalize().map_err(|error| error.to_string())?;
    let ledger = Arc::new(Ledger::default());
    let marker = Team::marker_of(&scratch);
    let mut guard = start_guard(&marker)?;
    let team = Team::new(programs, &nats, scratch, Arc::clone(&ledger))?;
    println!("seed {}, {} s, a cluster", options.seed, options.length.as_secs());

    for replica in 0..REPLICAS.len() {
        team.start(replica)?;
    }
    is_joined(&team);
    let (applied, seen) = (Mutex::new(Applied::new()), Seen::default());
    thread::scope(|scope| {
        let mut callers = Vec::new();
        for number in 0..SESSIONS + STATELESS {
            let (team, seen, seed) = (&team, &seen, options.seed);
            callers.push(scope.spawn(move || call(team, seen, number, seed)));
        }
        // Every client has its session, and it is stored, before the first fault.
        team.until("the sessions of the clients", || {
            (team.warm_clients() == SESSIONS + STATELESS || team.is_over()).then_some(())
        });
        must_be_stored(&team);
        if options.is_recovery || LONG_RUN <= options.length {
            recovery::measure(&team, &seen, only);
        }
        let visitors = scope.spawn(|| visit(&team, &seen, options.seed));
        let targets = Target::ALL.into_iter().filter(|target| only.is_none_or(|only| only == target.name()));
        let injectors: Vec<_> = targets
            .map(|target| {
                let (team, applied) = (&team, &applied);
                scope.spawn(move || inject(team, target, options.seed, applied))
            })
            .collect();
        let end = Instant::now() + options.length;
        while Instant::now() < end && !team.is_over() {
            thread::sleep(Duration::from_millis(50));
        }
        team.end_faults();
        for injector in injectors {
            injector.join().expect("an injector does not panic");
        }
        faults::restore(&team);
        is_joined(&team);
        team.restored();
        for caller in callers {
            caller.join().expect("a client does not panic");
        }
        visitors.join().expect("a client does not panic");
    });
    let audit = check_audit(&team);
    ledger.close();
    end(&team, guard.id());
    // Its stdin closes, and it has no process left to end.
    drop(guard.stdin.take());
    let _ = guard.wait();
    never_two(&team);

    let text = fs::read_to_string(team.executions()).map_err(|error| error.to_string())?;
    let (tallies, breaches) = ledger.judge(&read_executions(&text)?);
    print_calls(&ledger, &tallies);
    report(&team, &seen, &lock_of(&applied), &audit);
    let kept = (!breaches.is_empty()).then_some(&team.scratch);
    for (name, disk) in REPLICAS.into_iter().zip(&team.disks) {
        disk.end(kept.map(|scratch| scratch.join(format!("{name}-state"))).as_deref());
    }
    if breaches.is_empty() {
        if let Err(error) = fs::remove_dir_all(&team.scratch) {
            eprintln!("chaos: cannot remove {}: {error}", team.scratch.display());
        }
        println!("no promise was broken");
        return Ok(true);
    }
    for breach in breaches.iter().take(20) {
        println!("BROKEN: {breach}");
    }
    println!("{} in all; the files of the run are in {}", breaches.len(), team.scratch.display());
    println!("again: cargo xtask chaos --cluster --seconds {} --seed {}", options.length.as_secs(), options.seed);
    Ok(false)
}

/// Waits until every replica is connected to NATS, and knows the owner of `one`.
fn is_joined(team: &Team) {
    for (replica, name) in REPLICAS.into_iter().enumerate() {
        let joined = team.until("the replicas to join", || {
            let state = team.state(replica)?;
            let one = state["backends"].as_array()?.iter().find(|backend| backend["name"] == "one")?;
            (state["cluster"]["connected"] == true && one["state"] == "ready").then_some(())
        });
        if joined.is_none() {
            let state = team.state(replica).map(|state| state.to_string()).unwrap_or_default();
            team.ledger.breach(format!("replica {name} does not join the cluster: {state}"));
        }
    }
}

fn must_be_stored(team: &Team) {
    for (replica, name) in REPLICAS.into_iter().enumerate() {
        let local = team.state(replica).map(|state| state["cluster"]["sessions_local"].clone());
        if local != Some(0.into()) {
            team.ledger.breach(format!("replica {name} has local sessions before the first fault: {local:?}"));
        }
    }
}

/// A client for the whole run.
fn call(team: &Team, seen: &Seen, number: usize, seed: u64) {
    let name = format!("client {number}");
    let mut random = Random::new(seed, &name);
    let mut client = match number < SESSIONS {
        false => Client::stateless(team, seen, name),
        true => {
            let opened = team
                .until("a session", || Client::open(team, seen, name.clone(), &team.life(number % REPLICAS.len())?));
            let Some(client) = opened else {
                return team.ledger.breach(format!("{name}: no session"));
            };
            client
        }
    };
    client.must_go_on();
    team.warmed();
    client.keep_calling(&mut random);
    client.must_go_on();
}

/// Opens sessions while there are faults. Those that are stored must continue at the end.
fn visit(team: &Team, seen: &Seen, seed: u64) {
    let mut random = Random::new(seed, "visitors");
    let mut visitors = Vec::new();
    while !team.is_restored() {
        let replica = random.between(0, REPLICAS.len() as u64) as usize;
        let number = seen.opened.load(Ordering::Relaxed);
        let is_ended = |life: &team::Life| life.is_ended.load(Ordering::SeqCst);
        if visitors.len() < VISITORS_MAX
            && let Some(life) = team.life(replica).filter(|life| !is_ended(life))
            && let Some(mut visitor) = Client::open(team, seen, format!("visitor {number}"), &life)
        {
            seen.opened.fetch_add(1, Ordering::Relaxed);
            let local = team.state(replica).map(|state| state["cluster"]["sessions_local"].clone());
            // A replica that was started again does not know what the one before it had.
            if local == Some(0.into()) && !is_ended(&life) {
                for _ in 0..5 {
                    visitor.call_any(&mut random);
                }
                visitors.push(visitor);
            } else {
                seen.local.fetch_add(1, Ordering::Relaxed);
            }
        }
        thread::sleep(Duration::from_millis(random.between(100, 600)));
    }
    for mut visitor in visitors {
        if !team.ledger.has_breach() {
            visitor.must_go_on();
        }
    }
}

fn inject(team: &Team, target: Target, seed: u64, applied: &Mutex<Applied>) {
    for fault in Plan::new(seed, target) {
        if team.is_over() {
            return;
        }
        team.note(&format!("{fault:?}"));
        let is_done = faults::apply(team, &fault);
        team.note(&format!("{:?} is over, done: {is_done}", fault.kind));
        let mut applied = lock_of(applied);
        let count = applied.entry((target, fault.kind)).or_default();
        *(if is_done { &mut count.0 } else { &mut count.1 }) += 1;
        drop(applied);
        team.pause(Duration::from_millis(fault.pause_ms));
    }
}

/// The ids of audit records, in order.
fn ids<'a>(lines: impl Iterator<Item = &'a str>) -> Vec<String> {
    let records = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
    records.filter_map(|record| record["id"].as_str().map(str::to_owned)).collect()
}

/// What is wrong with the published records of a replica. All of `required` must be there, nothing that is not in `local`.
fn compare(required: usize, published: &[String], local: &[String]) -> Result<(), String> {
    let mut known = HashSet::new();
    if let Some(twice) = published.iter().find(|id| !known.insert(id.as_str())) {
        return Err(format!("record {twice} was published twice"));
    }
    if let Some((at, id)) = published.iter().enumerate().find(|(at, id)| local.get(*at) != Some(*id)) {
        return Err(format!("published record {at} is {id}, and the local one is {:?}", local.get(at)));
    }
    match local.get(published.len()) {
        Some(next) if published.len() < required => Err(format!("record {next} was not published")),
        _ => Ok(()),
    }
}

/// Compares the audit stream with the local files of each replica. What was compared, for the report.
fn check_audit(team: &Team) -> String {
    let local = |replica: usize| ids(team.audit(replica).iter().map(String::as_str));
    let required: Vec<Vec<String>> = (0..REPLICAS.len()).map(local).collect();
    if required.iter().all(Vec::is_empty) {
        return "SKIPPED, since the records of this outlast have no id".to_owned();
    }
    let deadline = Instant::now() + HUNG_AFTER;
    loop {
        let problem = match team.ask(0, &["audit", "--cluster", REPLICAS[0], "--json"]) {
            Err(problem) => problem,
            Ok(output) if !output.status.success() => format!("`outlast audit --cluster` failed: {}", output.status),
            Ok(output) => {
                let all = ids(String::from_utf8_lossy(&output.stdout).lines());
                let problems = REPLICAS.into_iter().enumerate().filter_map(|(replica, name)| {
                    let is_own = |id: &&String| id.rsplit_once('-').is_some_and(|(of, _)| of == name);
                    let published: Vec<String> = all.iter().filter(is_own).cloned().collect();
                    compare(required[replica].len(), &published, &local(replica))
                        .err()
                        .map(|why| format!("{name}: {why}"))
                });
                problems.collect::<Vec<_>>().join("; ")
            }
        };
        if problem.is_empty() {
            let counts: Vec<String> = required.iter().map(|ids| ids.len().to_string()).collect();
            return format!("{} records of the replicas were published once and in order", counts.join(" + "));
        }
        if deadline < Instant::now() {
            team.ledger.breach(format!("audit: {problem}"));
            return problem;
        }
        thread::sleep(Duration::from_millis(200));
    }
}

/// No process of `one` has ever met another.
fn never_two(team: &Team) {
    let code = format!("\"exit_code\":{TWO_AT_ONCE}");
    for (replica, name) in REPLICAS.into_iter().enumerate() {
        for line in team.audit(replica).iter().filter(|line| line.contains(&code)) {
            team.ledger.breach(format!("replica {name}: two processes of `one` at the same time: {line}"));
        }
    }
}

/// Ends everything as an operator would; no process may be left.
fn end(team: &Team, guard: u32) {
    for (replica, name) in REPLICAS.into_iter().enumerate() {
        let code = team.end(replica, Signal::SIGTERM);
        if code != Some(0) {
            team.ledger.breach(format!("replica {name} ended with {code:?} instead of 0"));
        }
    }
    for server in lock_of(&team.nats).drain(..) {
        server.end();
    }
    let left: Vec<_> = team.left().into_iter().filter(|process| process.pid != guard).collect();
    for left in processes::wait_gone(&left, HUNG_AFTER) {
        team.ledger.breach(format!("process {} was left behind: {}", left.pid, left.command()));
        left.signal(Signal::SIGKILL);
    }
}

fn report(team: &Team, seen: &Seen, applied: &Applied, audit: &str) {
    let count = |number: &std::sync::atomic::AtomicU64| number.load(Ordering::Relaxed);
    println!(
        "connections that broke with their replica {}, streams that ended without the answer {}",
        count(&seen.broken),
        count(&seen.cut_streams)
    );
    for (text, count) in team.unavailable().iter().take(10) {
        println!("answered {count} times as not run: HTTP 503 {text}");
    }
    println!(
        "sessions: {SESSIONS} for the whole run; {} opened during faults, {} of them at replicas that reported local ones",
        count(&seen.opened),
        count(&seen.local)
    );
    println!("audit: {audit}");
    let mut records: BTreeMap<String, usize> = BTreeMap::new();
    for replica in 0..REPLICAS.len() {
        for record in team.audit(replica).iter().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            if let Some(event) = record["props"]["event_type"].as_str() {
                *records.entry(event.to_owned()).or_default() += 1;
            }
        }
    }
    let records: Vec<String> = records.into_iter().map(|(name, count)| format!("{name} {count}")).collect();
    println!("recorded by the replicas: {}", records.join(", "));
    for target in Target::ALL {
        let faults: Vec<String> = applied
            .iter()
            .filter(|((known, _), _)| *known == target)
            .map(|((_, kind), (done, missed))| match missed {
                0 => format!("{kind:?} {done}"),
                _ => format!("{kind:?} {done} ({missed} without a target)"),
            })
            .collect();
        println!("{}: {} of {} kinds: {}", target.name(), faults.len(), Plan::kinds(target), faults.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_audit_streams_are_found() {
        let list = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
        let local = list(&["a-1", "a-2", "a-3"]);
        let table: [(&[&str], Option<&str>); 6] = [
            (&["a-1", "a-2", "a-3"], None),
            // The last one was written after the snapshot.
            (&["a-1", "a-2"], None),
            (&["a-1"], Some("record a-2 was not published")),
            (&["a-1", "a-2", "a-2"], Some("record a-2 was published twice")),
            (&["a-1", "a-3"], Some("published record 1 is a-3, and the local one is Some(\"a-2\")")),
            (&["a-1", "a-2", "a-3", "a-4"], Some("published record 3 is a-4, and the local one is None")),
        ];
        for (published, problem) in table {
            assert_eq!(compare(2, &list(published), &local).err().as_deref(), problem, "{published:?}");
        }
        let lines = ["{\"id\":\"a-1\",\"props\":{}}", "{\"props\":{}}", "torn"];
        assert_eq!(ids(lines.into_iter()), ["a-1"]);
    }
}
