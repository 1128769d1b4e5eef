//! Development commands: `cargo xtask COMMAND`. Only std, so that it builds quickly.

mod book;
mod capi;
mod fuzz;
mod peers;
mod planted;
mod report;

use report::Failure;
use std::env;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::thread;

/// Read by the test programs.
const TEST_THREADS: &str = "RUST_TEST_THREADS";

const HELP: &str = "\
Development commands of outlast

Usage: cargo xtask COMMAND

Commands:
  test [ARGS…]                    Install the real peers, then run fmt, clippy and every test;
                                  ARGS go to `cargo test`
  sim --seeds N [--from SEED]     Run the simulated worlds of the core, N seeds from SEED (0) on
  sim --planted [NAME…]           Run the joined world on each planted bug (crates/core/tests/planted),
                                  or on those with NAME; fails if one is not found within 1,000 seeds
  fuzz [TARGET…] [--minutes N] [--keep]
                                  Build the fuzz targets with coverage and run each, or the named
                                  ones (relay, gateway, http, control, config), for N (20) minutes of
                                  processor time; --keep adds what covers more to the corpora. Needs
                                  Linux and a C++ compiler
  cross                           Type-check for Windows and macOS, if the cross tools are installed
  bench [mcp|gateway|cluster|pty|share] [ARGS…]
                                  Build the release profile and run the benchmark; ARGS go to it
  chaos [--cluster] [--minutes N] [--seed S]
                                  Faults on real processes of `mcp`, `gateway` and `run` under load; a ledger of
                                  all calls shows what was lost, executed twice or leaked (30 s by default).
                                  --cluster: on three gateways and three NATS servers instead; `--only T` limits
                                  the faults to replicas, nats, network or disks; `--recovery` (and two
                                  minutes or more) also measures how long each fault is noticed
  conformance [ARGS…]             Run the conformance suites against a server, directly and through
                                  the gateway; ARGS go to outlast-conformance
  capi                            Build the library for C, shared and static, with its header,
                                  into `capi` in the target folder, and link a program with each
  book                            Build the book in `docs` as HTML, into `book` in the target folder,
                                  and check every link in it
  peers                           Install the real peers and print their folder

Environment:
  OUTLAST_PEERS    the peers' folder itself; by default one named after their versions, in
                   `outlast-peers` under $XDG_CACHE_HOME or ~/.cache
  OUTLAST_CROSS    the cross tools' check.sh
  RUST_TEST_THREADS how many tests `test` runs at the same time; three for each core by default
";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let Some((command, rest)) = arguments.split_first() else {
        eprint!("{HELP}");
        return ExitCode::from(2);
    };
    let outcome = match command.as_str() {
        "test" => test(rest),
        "sim" => sim(rest),
        "fuzz" => fuzz::run(rest),
        "cross" => none(rest).and_then(|()| cross()),
        "bench" => bench(rest),
        "chaos" => chaos(rest),
        "conformance" => conformance(rest),
        "book" => none(rest).and_then(|()| book::build()),
        "capi" => none(rest).and_then(|()| capi::build()),
        "peers" => {
            none(rest).and_then(|()| peers::provide(peers::FOR_TESTS)).map(|folder| println!("{}", folder.display()))
        }
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(())
        }
        other => Err(Failure::usage(format!("unknown command `{other}`"))),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// All checks run even after one has failed, so that one run reports all failures.
fn test(arguments: &[String]) -> Result<(), Failure> {
    let peers = peers::provide(peers::FOR_TESTS)?;
    peers::shells();
    peers::namespaces();
    let mut failed = Vec::new();

    if !succeeds(cargo(["fmt", "--all", "--check"]))? {
        failed.push("fmt");
    }
    if !succeeds(cargo(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]))? {
        failed.push("clippy");
    }
    let mut tests = cargo(["test", "--workspace", "--no-fail-fast"]);
    tests.args(arguments).env(peers::VARIABLE, &peers);
    if env::var_os(TEST_THREADS).is_none() {
        tests.env(TEST_THREADS, test_threads().to_string());
    }
    match peers::browser() {
        Ok(()) => drop(tests.env(peers::BROWSER, "1")),
        Err(failure) => {
            failure.report();
            failed.push("browser");
        }
    }
    let tally = Tally::of(tests)?;
    if !tally.succeeded {
        failed.push("test");
    }

    println!("\n{} passed, {} failed, {} ignored", tally.passed, tally.failed, tally.ignored);
    if failed.is_empty() { Ok(()) } else { Err(Failure::new(format!("{} failed", failed.join(", ")))) }
}

/// How many tests run at the same time. Most tests of the program wait for processes: with two for each core, the cores were
/// idle half of the time.
fn test_threads() -> usize {
    3 * thread::available_parallelism().map_or(1, usize::from)
}

fn sim(arguments: &[String]) -> Result<(), Failure> {
    if let Some((option, names)) = arguments.split_first()
        && option == "--planted"
    {
        return planted::run(names);
    }
    let (mut seeds, mut from) = (None, "0");
    let mut rest = arguments.iter();
    while let Some(option) = rest.next() {
        let value = rest.next().ok_or_else(|| Failure::usage(format!("`{option}` wants a value")))?;
        value.parse::<u64>().map_err(|_| Failure::usage(format!("`{option} {value}`: not a whole number")))?;
        match option.as_str() {
            "--seeds" => seeds = Some(value),
            "--from" => from = value,
            _ => return Err(Failure::usage(format!("no option named `{option}`"))),
        }
    }
    let seeds = seeds.ok_or_else(|| Failure::usage("how many worlds? say --seeds N"))?;

    let mut command = cargo(["test", "-p", "outlast-core", "--profile", "sim", "--test", "sim"]);
    command.env("OUTLAST_SEEDS", seeds).env("OUTLAST_SEED_FROM", from);
    must(command, "the simulation failed")
}

fn cross() -> Result<(), Failure> {
    let named = env::var_os("OUTLAST_CROSS").map(PathBuf::from);
    let script = named.clone().unwrap_or_else(|| root().join("../shared/tools/cross/check.sh"));
    if !script.is_file() {
        if named.is_some() {
            return Err(Failure::new(format!("no cross tools at {}", script.display()))
                .hint("OUTLAST_CROSS names the check.sh of the cross tools"));
        }
        println!("cross: skipped, the cross tools are not here (OUTLAST_CROSS may name their check.sh)");
        return Ok(());
    }
    let mut command = Command::new("bash");
    command.arg(script).args([".", "windows-check", "macos-check"]).current_dir(root());
    must(command, "the workspace does not type-check everywhere")
}

fn bench(arguments: &[String]) -> Result<(), Failure> {
    let peers = match arguments.first().map(String::as_str) {
        // The rivals of a terminal are programs of the system; missing ones are reported.
        Some("pty") => peers::terminals(),
        Some("share") => peers::provide(peers::FOR_SHARE)?,
        Some("cluster") => peers::provide(peers::FOR_CLUSTER)?,
        _ => peers::provide(peers::FOR_BENCH)?,
    };
    let mut build = cargo(["build", "--release", "-p", "outlast", "-p", "outlast-e2e"]);
    // Only these programs: each is built with full optimisation, which takes long.
    for program in ["outlast", "outlast-bench", "outlast-echo", "outlast-hop", "outlast-puppet"] {
        build.args(["--bin", program]);
    }
    must(build, "the release build failed")?;
    let mut command = Command::new(target().join("release").join(format!("outlast-bench{}", env::consts::EXE_SUFFIX)));
    command.args(arguments).env(peers::VARIABLE, peers).current_dir(root());
    must(command, "the benchmark failed")
}

fn chaos(arguments: &[String]) -> Result<(), Failure> {
    must(cargo(["build", "-p", "outlast-e2e", "--bins"]), "the build failed")?;
    let mut command = Command::new(target().join("debug").join(format!("outlast-chaos{}", env::consts::EXE_SUFFIX)));
    command.args(arguments).current_dir(root());
    if arguments.iter().any(|argument| argument == "--cluster") {
        peers::namespaces();
        command.env(peers::VARIABLE, peers::provide(peers::FOR_CLUSTER)?);
    }
    must(command, "a promise was broken")
}

fn conformance(arguments: &[String]) -> Result<(), Failure> {
    let peers = peers::provide(peers::FOR_CONFORMANCE)?;
    must(cargo(["build", "-p", "outlast", "-p", "outlast-e2e", "--bins"]), "the build failed")?;
    let name = format!("outlast-conformance{}", env::consts::EXE_SUFFIX);
    let mut command = Command::new(target().join("debug").join(name));
    command.args(arguments).env(peers::VARIABLE, peers).current_dir(root());
    must(command, "not all is as expected")
}

/// The sum of the results that the test binaries printed.
struct Tally {
    succeeded: bool,
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Tally {
    fn of(mut command: Command) -> Result<Tally, Failure> {
        let mut child = command.stdout(Stdio::piped()).spawn().map_err(|error| cannot_run(&command, error))?;
        let mut tally = Tally { succeeded: false, passed: 0, failed: 0, ignored: 0 };
        let lines = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
        for line in lines.map_while(Result::ok) {
            println!("{line}");
            tally.read(&line);
        }
        tally.succeeded = child.wait().map_err(|error| cannot_run(&command, error))?.success();
        Ok(tally)
    }

    /// `test result: ok. 12 passed; 0 failed; 1 ignored; …`
    fn read(&mut self, line: &str) {
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". ")) else {
            return;
        };
        for count in counts.split("; ") {
            match count.split_once(' ').map(|(number, what)| (number.parse::<u64>(), what)) {
                Some((Ok(number), "passed")) => self.passed += number,
                Some((Ok(number), "failed")) => self.failed += number,
                Some((Ok(number), "ignored")) => self.ignored += number,
                _ => {}
            }
        }
    }
}

fn none(arguments: &[String]) -> Result<(), Failure> {
    match arguments {
        [] => Ok(()),
        [first, ..] => Err(Failure::usage(format!("`{first}` is one argument too many"))),
    }
}

/// The workspace of the current directory: a target directory shared by two checkouts holds the xtask of only one of
/// them.
fn root() -> PathBuf {
    let xtask = env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    xtask.parent().expect("xtask lies in the workspace").to_owned()
}

fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

fn cargo<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root());
    command
}

fn succeeds(mut command: Command) -> Result<bool, Failure> {
    Ok(command.status().map_err(|error| cannot_run(&command, error))?.success())
}

fn must(command: Command, otherwise: &str) -> Result<(), Failure> {
    if succeeds(command)? { Ok(()) } else { Err(Failure::new(otherwise)) }
}

fn cannot_run(command: &Command, error: std::io::Error) -> Failure {
    Failure::new(format!("cannot run `{}`", command.get_program().display())).because(error)
}

#[cfg(test)]
mod tests {
    use super::Tally;

    #[test]
    fn the_tally_sums_the_results_of_the_test_binaries() {
        let mut tally = Tally { succeeded: true, passed: 0, failed: 0, ignored: 0 };
        for line in [
            "running 3 tests",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: FAILED. 2 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.20s",
        ] {
            tally.read(line);
        }
        assert_eq!((tally.passed, tally.failed, tally.ignored), (14, 3, 1));
    }
}
