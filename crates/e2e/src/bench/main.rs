//! The cost of the relay, compared with no relay, with `cat`, and with other programs that do the same.
//!
//! ```text
//! outlast-bench pty …                 (see `pty.rs`)
//! outlast-bench lists KIND CHANGING   (a server that the benchmark of the gateway starts)
//! outlast-bench [mcp] [--quick] [--only small,deep,big,rss,start,crash,reload] [--json] [--outlast PATH]
//! outlast-bench share [--quick] [--json] [--outlast PATH]
//! outlast-bench gateway [--quick] [--only small,load,rss,crash,loop,sessions] [--json] [--outlast PATH]
//! outlast-bench cluster [--quick] [--only small,load,owner,sessions,switch] [--json] [--outlast PATH]
//! ```
//!
//! All subjects relay to the same native echo server and are measured in one run, round by round in rotating order, so
//! that the ratios hold on a busy machine. `outlast` and `outlast-echo` are taken from beside this program. Rivals are
//! looked for in the virtual environments under `$OUTLAST_PEERS`.

mod cluster;
mod gateway;
mod measure;
mod pty;
mod samples;
mod session;
mod share;
mod subject;
mod table;
mod tree;

use std::{env, path::PathBuf, process::ExitCode};

use measure::{Bench, Phase};
use subject::Stage;

struct Options {
    is_quick: bool,
    is_json: bool,
    only: Only,
    outlast: Option<PathBuf>,
}

enum Only {
    Mcp(Vec<Phase>),
    Gateway(Vec<gateway::Phase>),
    Cluster(Vec<cluster::Phase>),
    Share,
}

pub(crate) fn main() -> ExitCode {
    if env::args().nth(1).is_some_and(|word| word == "pty") {
        return pty::main(env::args().skip(2)).unwrap_or_else(|problem| {
            eprintln!("error: {problem}");
            ExitCode::from(2)
        });
    }
    if env::args().nth(1).is_some_and(|word| word == "lists") {
        return gateway::lists::main(env::args().skip(2)).unwrap_or(ExitCode::from(2));
    }
    let options = match read_options(env::args().skip(1)) {
        Ok(options) => options,
        Err(problem) => {
            eprintln!("error: {problem}");
            return ExitCode::from(2);
        }
    };
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options) -> Result<(), String> {
    let (json, markdown) = match &options.only {
        Only::Mcp(only) => {
            let stage = Stage::set(options.outlast).map_err(|problem| problem.to_string())?;
            let report = Bench::new(&stage, options.is_quick).run(only);
            (report.to_json(), report.to_markdown())
        }
        Only::Gateway(only) => {
            let report = gateway::run(options.outlast, options.is_quick, only)?;
            (report.to_json(), report.to_markdown())
        }
        Only::Cluster(only) => {
            let report = cluster::run(options.outlast, options.is_quick, only)?;
            (report.to_json(), report.to_markdown())
        }
        Only::Share => {
            let report = share::run(options.outlast, options.is_quick)?;
            (report.to_json(), report.to_markdown())
        }
    };
    if options.is_json {
        println!("{json}");
    } else {
        println!("{markdown}");
    }
    Ok(())
}

fn read_options(args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut args = args.peekable();
    let what = args.next_if(|arg| ["mcp", "gateway", "cluster", "share"].contains(&arg.as_str())).unwrap_or_default();
    let (mut is_quick, mut is_json, mut only, mut outlast) = (false, false, Vec::new(), None);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("`{arg}` needs a value"));
        match arg.as_str() {
            "--quick" => is_quick = true,
            "--json" => is_json = true,
            "--only" => only.extend(value()?.split(',').map(String::from)),
            "--outlast" => outlast = Some(value()?.into()),
            other => return Err(format!("no option `{other}`")),
        }
    }
    let only = match what.as_str() {
        "gateway" => Only::Gateway(phases(&only, &gateway::Phase::ALL, gateway::Phase::named)?),
        "cluster" => Only::Cluster(phases(&only, &cluster::Phase::ALL, cluster::Phase::named)?),
        "share" if only.is_empty() => Only::Share,
        "share" => return Err("`share` has no parts".into()),
        _ => Only::Mcp(phases(&only, &Phase::ALL, Phase::named)?),
    };
    Ok(Options { is_quick, is_json, only, outlast })
}

/// The named phases; without names all of them.
fn phases<T: Copy>(names: &[String], all: &[T], named: fn(&str) -> Option<T>) -> Result<Vec<T>, String> {
    if names.is_empty() {
        return Ok(all.to_vec());
    }
    names.iter().map(|name| named(name).ok_or_else(|| format!("no benchmark `{name}`"))).collect()
}
