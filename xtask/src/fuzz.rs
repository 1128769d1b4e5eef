//! `cargo xtask fuzz`: builds the fuzz targets with coverage on stable Rust and runs them under libFuzzer.
//!
//! The flags of LLVM's coverage pass are stable (`-C passes`, `-C llvm-args`); libFuzzer itself is C++ source in
//! the crate `libfuzzer-sys`, built with the C++ compiler of the system.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use crate::{cannot_run, cargo, must, report::Failure, root, succeeds, target};

/// As in `outlast_fuzz::TARGETS`.
const TARGETS: [&str; 5] = ["relay", "gateway", "http", "control", "config"];
const MINUTES: u64 = 20;
/// What guides libFuzzer: counters for each edge, and the operands of comparisons.
const FLAGS: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Cllvm-args=-simplifycfg-branch-fold-threshold=0",
];
/// The longest generated input; repeated text counts unexpanded.
const INPUT_MAX: usize = 4096;
/// An input that takes longer, or more memory in all, is reported.
const INPUT_SECONDS: u64 = 60;
const MEMORY_MB: u64 = 1024;
/// How often the processor time of a run is checked.
const LOOK_EVERY: Duration = Duration::from_secs(1);

struct Wanted {
    targets: Vec<String>,
    minutes: u64,
    keep: bool,
}

pub(crate) fn run(arguments: &[String]) -> Result<(), Failure> {
    let wanted = read(arguments)?;
    if !cfg!(target_os = "linux") {
        return Err(Failure::new("fuzzing with coverage runs on Linux")
            .hint("`cargo test -p outlast-fuzz` replays the corpora everywhere"));
    }
    let compiler = env::var_os("CXX").unwrap_or_else(|| OsString::from("c++"));
    let found = Command::new(&compiler).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !found.is_ok_and(|status| status.success()) {
        return Err(Failure::new(format!("no C++ compiler (`{}`), which libFuzzer is built with", compiler.display()))
            .hint("install `g++` (Debian, Ubuntu), `gcc-c++` (Fedora) or `clang`, or name a compiler by CXX"));
    }
    let program = build()?;
    let mut failed = Vec::new();
    for target in &wanted.targets {
        if !fuzz(&program, target, wanted.minutes)? {
            failed.push(target.as_str());
        }
        if wanted.keep {
            keep(&program, target)?;
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(format!("findings in {}", failed.join(", "))).hint(format!(
            "the inputs are in {}; put each into crates/fuzz/corpus and fix what it shows",
            work().join("findings").display()
        ))),
    }
}

fn read(arguments: &[String]) -> Result<Wanted, Failure> {
    let mut wanted = Wanted { targets: Vec::new(), minutes: MINUTES, keep: false };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--keep" => wanted.keep = true,
            "--minutes" => {
                let value = rest.next().ok_or_else(|| Failure::usage("`--minutes` wants a value"))?;
                wanted.minutes =
                    value.parse().map_err(|_| Failure::usage(format!("`--minutes {value}`: not a whole number")))?;
            }
            name if TARGETS.contains(&name) => wanted.targets.push(name.to_owned()),
            other => {
                let targets = TARGETS.join(", ");
                return Err(Failure::usage(format!("no fuzz target or option `{other}`; there are {targets}")));
            }
        }
    }
    if wanted.targets.is_empty() {
        wanted.targets = TARGETS.map(str::to_owned).to_vec();
    }
    Ok(wanted)
}

fn work() -> PathBuf {
    target().join("fuzz")
}

/// With an explicit `--target`, the flags do not apply to build scripts and procedural macros.
fn build() -> Result<PathBuf, Failure> {
    let host = host()?;
    let mut command = cargo(["build", "--profile", "fuzz", "-p", "outlast-fuzz", "--features", "engine"]);
    command.args(["--target", &host, "--target-dir"]).arg(work());
    command.env_remove("CARGO_ENCODED_RUSTFLAGS").env("RUSTFLAGS", FLAGS.join(" "));
    must(command, "the fuzz targets do not build")?;
    Ok(work().join(host).join("fuzz").join("outlast-fuzz"))
}

fn host() -> Result<String, Failure> {
    let mut command = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    let output = command.arg("-vV").output().map_err(|error| cannot_run(&command, error))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| Failure::new("rustc does not say what it builds for"))
}

fn corpus(target: &str) -> PathBuf {
    root().join("crates/fuzz/corpus").join(target)
}

/// Inputs that runs have found; they are kept for the next run.
fn found(target: &str) -> PathBuf {
    work().join("corpus").join(target)
}

fn engine(program: &Path, target: &str) -> Result<Command, Failure> {
    let findings = work().join("findings");
    for folder in [&found(target), &findings] {
        fs::create_dir_all(folder)
            .map_err(|error| Failure::new(format!("cannot make the folder {}", folder.display())).because(error))?;
    }
    // libFuzzer's `main` does not ignore SIGPIPE as Rust's does, and the targets' connections are closed at any time.
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' PIPE; exec \"$0\" \"$@\""])
        .arg(program)
        .env("OUTLAST_FUZZ_TARGET", target)
        .arg(format!("-artifact_prefix={}/{target}-", findings.display()))
        .arg(format!("-max_len={INPUT_MAX}"))
        .arg(format!("-timeout={INPUT_SECONDS}"))
        .arg(format!("-rss_limit_mb={MEMORY_MB}"))
        .current_dir(root());
    Ok(command)
}

/// Runs a target until it has used its processor time; false if it found a failure.
fn fuzz(program: &Path, target: &str, minutes: u64) -> Result<bool, Failure> {
    println!("fuzz: {target}, {minutes} minutes of processor time");
    let mut command = engine(program, target)?;
    command.arg(format!("-dict={}", root().join("crates/fuzz/dictionary").display()));
    command.args(["-print_final_stats=1", "-reload=0"]).arg(found(target)).arg(corpus(target));
    let mut child = command.spawn().map_err(|error| cannot_run(&command, error))?;
    loop {
        if let Some(status) = child.try_wait().map_err(|error| cannot_run(&command, error))? {
            return Ok(status.success());
        }
        if cpu_time(child.id()) >= Duration::from_secs(60 * minutes) {
            // libFuzzer prints its figures and exits with 0.
            let mut kill = Command::new("kill");
            kill.args(["-USR1", &child.id().to_string()]);
            must(kill, "the run cannot be ended")?;
            return Ok(child.wait().map_err(|error| cannot_run(&command, error))?.success());
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Processor time of the first thread, which runs the inputs: a loaded machine does not shorten a run.
fn cpu_time(pid: u32) -> Duration {
    let text = fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default();
    let nanos = text.split(' ').next().and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

/// Adds inputs to the corpus that cover more than the corpus does, the smallest first.
fn keep(program: &Path, target: &str) -> Result<(), Failure> {
    let mut command = engine(program, target)?;
    command.arg("-merge=1").arg(corpus(target)).arg(found(target));
    match succeeds(command)? {
        true => Ok(()),
        false => Err(Failure::new(format!("the corpus of `{target}` could not be added to"))),
    }
}

#[cfg(test)]
mod tests {
    use super::{TARGETS, read};

    #[test]
    fn arguments_choose_targets_and_time() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<String>>();
        let all = read(&[]).unwrap();
        assert_eq!((all.targets.len(), all.minutes, all.keep), (TARGETS.len(), 20, false));
        let some = read(&words("relay http --minutes 3 --keep")).unwrap();
        assert_eq!((some.targets, some.minutes, some.keep), (words("relay http"), 3, true));
        assert!(read(&words("relais")).is_err());
        assert!(read(&words("--minutes")).is_err());
        assert!(read(&words("--minutes soon")).is_err());
    }
}
