//! Faults on real processes: `outlast mcp`, `gateway` and `run` at the same time, under load, while servers,
//! monitors, keepers, clients and outlast itself are killed and stopped, files change, and the disk and the clock
//! misbehave.
//!
//! ```text
//! outlast-chaos [--cluster [--only TARGET] [--recovery]] [--minutes N | --seconds N] [--seed S] [--outlast PATH]
//! ```
//!
//! The plan of faults is a function of the seed ([`plan`]). Every call is entered in a ledger when it is sent, when
//! it is answered and, by the server, when it is executed; the ledger checks which promises were broken ([`ledger`]).
//! Nothing is judged by its duration, except by a deadline far beyond every time limit of the run. `--cluster` does the
//! same to a cluster of gateways ([`cluster`]).

mod cluster;
mod faults;
mod http;
mod ledger;
mod machine;
mod message;
mod plan;
mod processes;
mod random;
mod stdio;
mod world;

use std::{
    collections::BTreeMap,
    env, fs,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Child, Command, ExitCode, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant, SystemTime},
};

use nix::sys::signal::Signal;
use serde_json::json;

use faults::Injector;
use http::Http;
use ledger::{Answer, HUNG_AFTER, Ledger, Tally, read_executions};
use message::Request;
use plan::{Kind, Part, Plan};
use processes::Process;
use random::Random;
use world::{BACKENDS, Holdings, Programs, World};

/// How many calls a client on stdio has open at the same time, at most.
const IN_FLIGHT_MAX: u64 = 12;
/// Answered calls of each client before anything is measured.
const WARM_UP: usize = 60;
/// The allowed memory growth of outlast between the warm-up and the end. A message and its copies may still be in the
/// allocator.
const MEMORY_GROWTH_MAX: u64 = 24 << 20;
const DESCRIPTOR_GROWTH_MAX: usize = 8;

/// The argument that makes this program the guard of another one.
const GUARD: &str = "--guard";
/// How long keepers have to end their processes.
const GUARD_WAIT: Duration = Duration::from_secs(10);

struct Options {
    length: Duration,
    seed: u64,
    outlast: Option<PathBuf>,
    is_cluster: bool,
    /// The only target of faults in a cluster.
    only: Option<String>,
    /// Measure how long a cluster takes to recover, also in a short run.
    is_recovery: bool,
}

pub(crate) fn main() -> ExitCode {
    if env::args().nth(1).as_deref() == Some(GUARD) {
        return guard(&env::args().nth(2).unwrap_or_default());
    }
    let options = match read_options(env::args().skip(1)) {
        Ok(options) => options,
        Err(problem) => {
            eprintln!("error: {problem}");
            return ExitCode::from(2);
        }
    };
    machine::enter_namespace(options.is_cluster);
    let outcome = if options.is_cluster { cluster::run(&options) } else { run(&options) };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn read_options(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let nanos = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.subsec_nanos());
    let seed = u64::from(nanos) / 1000;
    let mut options = Options {
        length: Duration::from_secs(30),
        seed,
        outlast: None,
        is_cluster: false,
        only: None,
        is_recovery: false,
    };
    while let Some(arg) = args.next() {
        let flag = match arg.as_str() {
            "--cluster" => Some(&mut options.is_cluster),
            "--recovery" => Some(&mut options.is_recovery),
            _ => None,
        };
        if let Some(flag) = flag {
            *flag = true;
            continue;
        }
        let value = args.next().ok_or_else(|| format!("`{arg}` needs a value"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("`{arg} {value}`: not a whole number"));
        match arg.as_str() {
            "--minutes" => options.length = Duration::from_secs(60 * number()?),
            "--seconds" => options.length = Duration::from_secs(number()?),
            "--seed" => options.seed = number()?,
            "--outlast" => options.outlast = Some(value.into()),
            "--only" => options.only = Some(value),
            other => return Err(format!("no option `{other}`")),
        }
    }
    Ok(options)
}

/// Ends the processes of a run whose driver was killed: stdin closes with the driver.
fn guard(marker: &str) -> ExitCode {
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    let all = processes::marked(marker);
    // Each outlast first: its keeper and its monitors kill the processes that have no marker.
    let is_outermost = |process: &&Process| !processes::parent(**process).is_some_and(|parent| all.contains(&parent));
    for process in all.iter().filter(is_outermost) {
        process.signal(Signal::SIGKILL);
    }
    for left in processes::wait_gone(&all, GUARD_WAIT) {
        left.signal(Signal::SIGKILL);
    }
    ExitCode::SUCCESS
}

fn start_guard(marker: &str) -> Result<Child, String> {
    let program = env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    // In a group of its own, so that Ctrl-C does not reach it.
    command.args([GUARD, marker]).stdin(Stdio::piped()).process_group(0);
    command.spawn().map_err(|error| error.to_string())
}

/// How often each fault was carried out, and how often its target did not exist.
type Applied = BTreeMap<(Part, Kind), (u64, u64)>;

/// False if a promise was broken.
fn run(options: &Options) -> Result<bool, String> {
    let programs = Programs::find(options.outlast.clone())?;
    // A process that escapes from its parents becomes a child of this program, and is found.
    nix::sys::prctl::set_child_subreaper(true).map_err(|error| error.to_string())?;
    let scratch = tempfile::Builder::new().prefix("outlast-chaos-").tempdir().map_err(|error| error.to_string())?;
    let scratch = scratch.keep().canonicalize().map_err(|error| error.to_string())?;
    let ledger = Arc::new(Ledger::default());
    let world = World::new(programs, scratch, Arc::clone(&ledger));
    let mut guard = start_guard(&world.marker())?;
    println!("seed {}, {} s", options.seed, options.length.as_secs());

    let applied = Mutex::new(Applied::new());
    let mut grown = Vec::new();
    world.start_gateway()?;
    for part in [Part::Relay, Part::ShortRelay, Part::ShortGateway] {
        world.connect(part);
    }
    world.start_session();

    thread::scope(|scope| {
        let callers = start_callers(scope, &world, options.seed);
        let injectors = Part::ALL.map(|part| Injector::new(&world, part));
        let before = warm_up(&world);
        let injectors = injectors.map(|injector| {
            let applied = &applied;
            scope.spawn(move || inject(injector, options.seed, applied))
        });
        let end = Instant::now() + options.length;
        while Instant::now() < end && !world.is_over() {
            thread::sleep(Duration::from_millis(50));
        }
        world.end_faults();
        for injector in injectors {
            injector.join().expect("an injector does not panic");
        }
        restore(&world);
        ledger.close();
        for caller in callers {
            caller.join().expect("a client does not panic");
        }
        grown = compare(&world, &before);
    });
    end(&world, guard.id());
    // Its stdin closes, and it has no process left to end.
    drop(guard.stdin.take());
    let _ = guard.wait();

    let text = fs::read_to_string(world.executions()).map_err(|error| error.to_string())?;
    let (tallies, breaches) = ledger.judge(&read_executions(&text)?);
    report(&world, &tallies, &applied.into_inner().expect("no thread panics while it holds this"), &grown);
    let copy = world.scratch.join("state");
    world.disk.end((!breaches.is_empty()).then_some(copy.as_path()));
    if breaches.is_empty() {
        if let Err(error) = fs::remove_dir_all(&world.scratch) {
            eprintln!("chaos: cannot remove {}: {error}", world.scratch.display());
        }
        println!("no promise was broken");
        return Ok(true);
    }
    for breach in breaches.iter().take(20) {
        println!("BROKEN: {breach}");
    }
    println!("{} in all; the files of the run are in {}", breaches.len(), world.scratch.display());
    println!("again: cargo xtask chaos --seconds {} --seed {}", options.length.as_secs(), options.seed);
    Ok(false)
}

type Scoped<'scope> = thread::ScopedJoinHandle<'scope, ()>;

/// Clients that call all the time, each with requests of its own.
fn start_callers<'scope, 'env>(
    scope: &'scope thread::Scope<'scope, 'env>,
    world: &'env World,
    seed: u64,
) -> Vec<Scoped<'scope>> {
    let mut callers = Vec::new();
    for (part, number) in [(Part::Relay, 0), (Part::Relay, 1), (Part::ShortRelay, 0), (Part::ShortGateway, 0)] {
        let random = Random::new(seed, &format!("client {number} of {}", part.name()));
        callers.push(scope.spawn(move || call_over_stdio(world, part, random)));
    }
    for number in 0..6 {
        let random = Random::new(seed, &format!("client {number} of gateway"));
        // Some are of the stateless era, and have no session for a backend with a process per session.
        callers.push(scope.spawn(move || call_over_http(world, number < 4, random)));
    }
    callers
}

fn call_over_stdio(world: &World, part: Part, mut random: Random) {
    let prefix = if part == Part::ShortGateway { "a__" } else { "" };
    loop {
        let pause = Duration::from_millis(random.between(1, 25));
        if let Some(connection) = world.connection(part) {
            let count = random.between(1, IN_FLIGHT_MAX);
            let calls: Vec<u64> =
                (0..count).map_while(|_| connection.send(&Request::any(&mut random, prefix))).collect();
            for call in &calls {
                world.ledger.wait(*call);
            }
            if calls.is_empty() {
                return;
            }
        }
        thread::sleep(pause);
    }
}

fn call_over_http(world: &World, has_session: bool, mut random: Random) {
    let mut http = match has_session {
        false => Http::stateless(&world.address(), &world.ledger),
        true => match Http::open(&world.address(), &world.ledger) {
            Ok(http) => http,
            Err(error) => return world.ledger.breach(format!("gateway: no session: {error}")),
        },
    };
    let backends = if has_session { 3 } else { 2 };
    loop {
        let pause = Duration::from_millis(random.between(1, 25));
        let prefix = format!("{}__", BACKENDS[random.between(0, backends) as usize]);
        if http.call(&Request::any(&mut random, &prefix)).is_none() {
            return;
        }
        thread::sleep(pause);
    }
}

/// Waits until every server has answered, and buffers have reached their size.
fn warm_up(world: &World) -> Vec<(Part, Holdings)> {
    for _ in 0..WARM_UP {
        must_answer(world);
    }
    let parts = [Part::Relay, Part::Gateway];
    parts.into_iter().filter_map(|part| Some((part, world.holdings(part)?))).collect()
}

/// A call to each lasting server, repeated until it succeeds.
fn must_answer(world: &World) {
    let mut http = match Http::open(&world.address(), &world.ledger) {
        Ok(http) => http,
        Err(error) => return world.ledger.breach(format!("gateway: no session: {error}")),
    };
    for backend in BACKENDS.into_iter().take(2) {
        let request = Request::tool(format!("{backend}__echo"), json!({}));
        let done = world.until("a backend that answers", || {
            let call = http.call(&request)?;
            (world.ledger.last_answer(call) == Some(Answer::Done)).then_some(())
        });
        if done.is_none() {
            world.ledger.breach(format!("gateway: the backend `{backend}` does not come back"));
        }
    }
    for part in [Part::Relay, Part::ShortRelay, Part::ShortGateway] {
        let name = if part == Part::ShortGateway { "a__echo" } else { "echo" };
        let request = Request::tool(name, json!({}));
        let done = world.until("a server that answers", || {
            let call = world.connection(part)?.send(&request)?;
            world.ledger.wait(call);
            (world.ledger.last_answer(call) == Some(Answer::Done)).then_some(())
        });
        if done.is_none() {
            world.ledger.breach(format!("{}: the server does not come back", part.name()));
        }
    }
}

fn inject(mut injector: Injector<'_>, seed: u64, applied: &Mutex<Applied>) {
    let part = injector.part;
    for fault in Plan::new(seed, part) {
        if injector.world.is_over() {
            return;
        }
        let is_done = injector.apply(&fault);
        let mut applied = applied.lock().expect("no thread panics while it holds this");
        let count = applied.entry((part, fault.kind)).or_default();
        *(if is_done { &mut count.0 } else { &mut count.1 }) += 1;
        drop(applied);
        thread::sleep(Duration::from_millis(fault.pause_ms));
    }
}

/// Ends the lasting faults, and checks that everything works again.
fn restore(world: &World) {
    if let Some(clock) = &world.clock {
        clock.set(0);
    }
    world.write_source(0);
    world.write_config(0, false);
    for part in [Part::Relay, Part::ShortRelay] {
        let _ = world.ask(&["resume", part.name()]);
    }
    must_answer(world);
    world.until_ready();
}

/// Compares the resources of the lasting parts with those before.
fn compare(world: &World, before: &[(Part, Holdings)]) -> Vec<(Part, Holdings, Holdings)> {
    let mut grown = Vec::new();
    for (part, before) in before {
        let name = part.name();
        // Replaced servers may still finish their calls.
        let settled = world.until("the number of processes of the start", || {
            world.holdings(*part).filter(|now| now.processes <= before.processes)
        });
        let Some(now) = settled.or_else(|| world.holdings(*part)) else {
            world.ledger.breach(format!("{name}: it is gone"));
            continue;
        };
        grown.push((*part, *before, now));
        if before.processes < now.processes {
            let (was, is) = (before.processes, now.processes);
            world.ledger.breach(format!("{name}: {is} processes below it, and {was} at the start"));
        }
        if before.descriptors + DESCRIPTOR_GROWTH_MAX < now.descriptors {
            let (was, is) = (before.descriptors, now.descriptors);
            world.ledger.breach(format!("{name}: {is} descriptors, and {was} at the start"));
        }
        if before.memory + MEMORY_GROWTH_MAX < now.memory {
            let (was, is) = (before.memory >> 10, now.memory >> 10);
            world.ledger.breach(format!("{name}: {is} KiB of memory, and {was} at the start"));
        }
    }
    grown
}

/// Ends everything as a user would; no process may be left.
fn end(world: &World, guard: u32) {
    let ended = |part: Part, code: Option<i32>| {
        if code != Some(0) {
            world.ledger.breach(format!("{}: it ended with {code:?} instead of 0", part.name()));
        }
    };
    for part in [Part::Relay, Part::ShortRelay, Part::ShortGateway] {
        if let Some(connection) = world.connection(part) {
            connection.close_stdin();
            ended(part, connection.wait().and_then(|status| status.code()));
        }
    }
    ended(Part::Gateway, world.end_gateway().and_then(|status| status.code()));
    if !world.ask(&["stop", "session"]).is_ok_and(|output| output.status.success()) {
        world.ledger.breach("session: `outlast stop` failed".into());
    }
    let left: Vec<_> = world.left().into_iter().filter(|process| process.pid != guard).collect();
    for left in processes::wait_gone(&left, HUNG_AFTER) {
        world.ledger.breach(format!("process {} was left behind: {}", left.pid, left.command()));
        left.signal(Signal::SIGKILL);
    }
}

/// The ledger as a table.
fn print_calls(ledger: &Ledger, tallies: &BTreeMap<&'static str, Tally>) {
    println!(
        "| part | sent | done | not sent | unknown | refused | ended | hung | executed | answered twice | executed twice |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for (part, tally) in tallies {
        let Tally { sent, done, not_sent, unknown, refused, ended, hung, executed, answered_twice, executed_twice } =
            tally;
        println!(
            "| {part} | {sent} | {done} | {not_sent} | {unknown} | {refused} | {ended} | {hung} | {executed} | \
             {answered_twice} | {executed_twice} |"
        );
    }
    println!();
    for (text, count) in ledger.refusals().into_iter().take(10) {
        println!("refused {count} times: {text}");
    }
}

fn report(
    world: &World,
    tallies: &BTreeMap<&'static str, Tally>,
    applied: &Applied,
    grown: &[(Part, Holdings, Holdings)],
) {
    println!("full disk: {}", world.disk.name());
    let clock = match world.clock {
        Some(_) => "the wall clock of all outlast processes (in libc; the kernel's clock is not set)",
        None => "none, as there is no C compiler; only SIGSTOP of outlast",
    };
    println!("clock jumps: {clock}\n");
    print_calls(&world.ledger, tallies);
    for (part, before, now) in grown {
        println!(
            "{}: processes {} → {}, descriptors {} → {}, memory {} → {} KiB",
            part.name(),
            before.processes,
            now.processes,
            before.descriptors,
            now.descriptors,
            before.memory >> 10,
            now.memory >> 10
        );
    }
    let records: Vec<String> = world.records().into_iter().map(|(name, count)| format!("{name} {count}")).collect();
    println!("recorded by outlast: {}", records.join(", "));
    for part in Part::ALL {
        let faults: Vec<String> = applied
            .iter()
            .filter(|((known, _), _)| *known == part)
            .map(|((_, kind), (done, missed))| match missed {
                0 => format!("{kind:?} {done}"),
                _ => format!("{kind:?} {done} ({missed} without a target)"),
            })
            .collect();
        println!("{}: {} of {} kinds: {}", part.name(), faults.len(), Plan::kinds(part), faults.join(", "));
    }
}
