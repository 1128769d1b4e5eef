//! The cost of an intermediate terminal: `outlast run` with and without its screen model, compared with a bare pty,
//! `script`, `dtach` and `tmux`.
//!
//! ```text
//! outlast-bench pty [--quick] [--only copy,echo,idle,exact] [--json] [--outlast PATH] [--exact-mb N[,N]]
//! ```
//!
//! Each subject runs the same child, on a pty of this program in place of a person's terminal: text is copied until
//! its last word is shown, keys are echoed, and an idle time is measured. `exact` sends random bytes through outlast
//! and compares every byte.

mod child;
mod report;
mod rig;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use report::{Metric, Report};
use rig::{Rig, Stage, Subject};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Copy,
    Echo,
    Idle,
    Exact,
}

impl Phase {
    const ALL: [Self; 4] = [Self::Copy, Self::Echo, Self::Idle, Self::Exact];

    fn named(name: &str) -> Option<Self> {
        match name {
            "copy" => Some(Self::Copy),
            "echo" => Some(Self::Echo),
            "idle" => Some(Self::Idle),
            "exact" => Some(Self::Exact),
            _ => None,
        }
    }
}

struct Options {
    is_quick: bool,
    is_json: bool,
    only: Vec<Phase>,
    outlast: Option<PathBuf>,
    /// Without and with the screen model.
    exact_mb: Option<(u64, u64)>,
}

pub(super) fn main(args: impl Iterator<Item = String>) -> Result<ExitCode, String> {
    let mut args = args.peekable();
    if args.peek().is_some_and(|word| word == child::WORD) {
        return child::run(args.skip(1)).map(|()| ExitCode::SUCCESS);
    }
    let options = read_options(args)?;
    let stage = Stage::set(options.outlast.clone()).map_err(|problem| problem.to_string())?;
    let report = measure(&stage, &options);
    if options.is_json {
        println!("{}", report.to_json());
    } else {
        println!("{}", report.to_markdown());
    }
    Ok(if report.is_sound() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn read_options(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options { is_quick: false, is_json: false, only: Vec::new(), outlast: None, exact_mb: None };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("`{arg}` needs a value"));
        match arg.as_str() {
            "--quick" => options.is_quick = true,
            "--json" => options.is_json = true,
            "--only" => {
                for name in value()?.split(',') {
                    options.only.push(Phase::named(name).ok_or_else(|| format!("no benchmark `{name}`"))?);
                }
            }
            "--outlast" => options.outlast = Some(value()?.into()),
            "--exact-mb" => {
                let numbers: Vec<Option<u64>> = value()?.split(',').map(|number| number.parse().ok()).collect();
                options.exact_mb = match numbers[..] {
                    [Some(both)] => Some((both, both)),
                    [Some(without), Some(with)] => Some((without, with)),
                    _ => return Err("`--exact-mb` wants a number, or two with a comma between".into()),
                };
            }
            other => return Err(format!("no option `{other}`")),
        }
    }
    if options.only.is_empty() {
        options.only = Phase::ALL.to_vec();
    }
    Ok(options)
}

fn measure(stage: &Stage, options: &Options) -> Report {
    let (rounds, copy_mb, keys) = if options.is_quick { (3, 8, 200) } else { (7, 32, 800) };
    let by_default = if options.is_quick { 64 } else { 1024 };
    let (without, with) = options.exact_mb.unwrap_or((by_default, by_default));
    let mut report = Report::new(rounds);
    let mut subjects = Vec::new();
    for subject in Subject::ALL {
        match stage.absence(subject) {
            Some(why) => report.note(format!("`{}` is not measured: {why}", subject.name())),
            None => subjects.push(subject),
        }
    }
    let wants = |phase: Phase| options.only.contains(&phase);
    for round in 0..rounds {
        // The subject that is measured first in one round comes later in the next.
        subjects.rotate_left(1);
        for &subject in &subjects {
            eprintln!("round {} of {rounds}: {}", round + 1, subject.name());
            if let Err(problem) = sample(stage, subject, &wants, copy_mb, keys, &mut report) {
                report.fail(format!("{} in round {}: {problem}", subject.name(), round + 1));
            }
        }
    }
    if wants(Phase::Exact) {
        for (subject, exact_mb) in [(Subject::OutlastPlain, without), (Subject::Outlast, with)] {
            match exact(stage, subject, exact_mb << 20) {
                Ok(took) => {
                    let speed = exact_mb as f64 / took.as_secs_f64();
                    report.note(format!("{exact_mb} MiB of noise through {}: exact, {speed:.0} MiB/s", subject.name()));
                }
                Err(problem) => report.fail(format!("{exact_mb} MiB of noise through {}: {problem}", subject.name())),
            }
        }
    }
    report
}

fn sample(
    stage: &Stage,
    subject: Subject,
    wants: &dyn Fn(Phase) -> bool,
    copy_mb: u64,
    keys: usize,
    report: &mut Report,
) -> Result<(), String> {
    if !(wants(Phase::Copy) || wants(Phase::Echo) || wants(Phase::Idle)) {
        return Ok(());
    }
    let mut rig = Rig::start(stage, subject)?;
    if wants(Phase::Echo) {
        report.sample(Metric::Echo, subject, rig.echo(keys)?);
    }
    if wants(Phase::Copy) {
        let before = rig.cpu();
        let took = rig.copy(copy_mb << 20)?;
        let megabytes = copy_mb as f64 * 1.048_576;
        report.sample(Metric::Copy, subject, megabytes / took.as_secs_f64());
        report.sample(Metric::Cpu, subject, (rig.cpu() - before).as_secs_f64() * 1000.0 / megabytes);
        report.sample(Metric::Rss, subject, rig.memory() as f64 / 1e6);
    }
    if wants(Phase::Idle) {
        report.sample(Metric::Idle, subject, rig.idle(Duration::from_secs(2)));
    }
    rig.end();
    Ok(())
}

fn exact(stage: &Stage, subject: Subject, bytes: u64) -> Result<Duration, String> {
    let mut rig = Rig::start(stage, subject)?;
    let took = rig.exact(bytes)?;
    rig.end();
    Ok(took)
}
