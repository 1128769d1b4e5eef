//! The conformance suites against a server directly and through the gateway, side by side.
//!
//! ```text
//! outlast-conformance [--rounds N] [--suite NAME] [--way stdio|http|translated] [--outlast PATH]
//! ```
//!
//! A check that passes directly must pass through the gateway. The suites fail now and then by themselves, so all are
//! run several times, in turns. Known failures are listed in `peers/conformance/expected.txt`, which may only shrink:
//! an outdated line fails the run like a failure without a line.

mod stage;
mod verdict;

use std::{env, fs, path::PathBuf, process::ExitCode};

use stage::{Stage, Suite, Way};
use verdict::{Expected, Tally};

struct Options {
    rounds: u32,
    suites: Vec<Suite>,
    ways: Vec<Way>,
    outlast: Option<PathBuf>,
}

pub(crate) fn main() -> ExitCode {
    let outcome = read_options(env::args().skip(1)).map_err(|problem| (problem, 2));
    match outcome.and_then(|options| run(&options).map_err(|problem| (problem, 1))) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err((problem, code)) => {
            eprintln!("error: {problem}");
            ExitCode::from(code)
        }
    }
}

fn read_options(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options { rounds: 3, suites: Vec::new(), ways: Vec::new(), outlast: None };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("`{arg}` needs a value"));
        match arg.as_str() {
            "--rounds" => {
                options.rounds = value()?.parse().ok().filter(|rounds| *rounds > 0).ok_or("how many rounds?")?;
            }
            "--suite" => options.suites.push(Suite::named(&value()?)?),
            "--way" => options.ways.push(Way::named(&value()?)?),
            "--outlast" => options.outlast = Some(value()?.into()),
            other => return Err(format!("no option `{other}`")),
        }
    }
    if options.suites.is_empty() {
        options.suites = Suite::ALL.to_vec();
    }
    if options.ways.is_empty() {
        options.ways = Way::ALL.to_vec();
    }
    Ok(options)
}

/// True if all results are as expected.
fn run(options: &Options) -> Result<bool, String> {
    let stage = Stage::set(options.outlast.clone())?;
    let listed = Stage::scripts().join("expected.txt");
    let listed = fs::read_to_string(&listed).map_err(|error| format!("{}: {error}", listed.display()))?;
    let mut expected = Expected::read(&listed)?;
    let mut problems = Vec::new();
    println!("| suite | way | checks | passed | failed | failed only through us | left out through us |");
    println!("|---|---|---:|---:|---:|---:|---:|");
    for suite in &options.suites {
        let fixture = stage.serve(*suite)?;
        let mut direct = Tally::default();
        let mut through: Vec<Tally> = options.ways.iter().map(|_| Tally::default()).collect();
        for round in 0..options.rounds {
            eprintln!("{}: round {} of {}", suite.name(), round + 1, options.rounds);
            direct.add(&stage.check(*suite, "direct", round, &fixture.url)?);
            for (way, tally) in options.ways.iter().zip(&mut through) {
                // A new gateway for each round, so that open state of one round does not affect the next.
                let gateway = stage.front(*suite, *way, &fixture)?;
                tally.add(&stage.check(*suite, way.name(), round, &gateway.url)?);
            }
        }
        let (checks, passed) = direct.count();
        println!("| {} | direct | {checks} | {passed} | {} | | |", suite.name(), checks - passed);
        for (way, tally) in options.ways.iter().zip(&through) {
            let (checks, passed) = tally.count();
            let worse = tally.worse_than(&direct);
            println!(
                "| {} | {} | {checks} | {passed} | {} | {} | {} |",
                suite.name(),
                way.name(),
                checks - passed,
                worse.len(),
                tally.left_out(&direct)
            );
            problems.extend(expected.judge(suite.name(), way.name(), &worse));
        }
    }
    for problem in &problems {
        println!("\n{problem}");
    }
    println!("\nThe details are in {}", stage.results().display());
    Ok(problems.is_empty())
}
