//! What the relay costs, side by side with nothing at all, with `cat`, and with others who do the same.
//!
//! ```text
//! outlast-bench pty …                 (see `pty.rs`)
//! outlast-bench [mcp] [--quick] [--only small,deep,big,rss,start,crash,reload] [--json] [--outlast PATH]
//! ```
//!
//! All subjects relay to the same native echo server and are measured in one run, round by round in rotating order, so
//! that the ratios hold on a busy machine. `outlast` and `outlast-echo` are taken from beside this program. Rivals are
//! looked for in the virtual environments under `$OUTLAST_PEERS`.

mod measure;
mod pty;
mod session;
mod subject;
mod table;
mod tree;

use std::{env, path::PathBuf, process::ExitCode};

use measure::{Bench, Phase};
use subject::Stage;

struct Options {
    is_quick: bool,
    is_json: bool,
    only: Vec<Phase>,
    outlast: Option<PathBuf>,
}

pub fn main() -> ExitCode {
    if env::args().nth(1).is_some_and(|word| word == "pty") {
        return pty::main(env::args().skip(2)).unwrap_or_else(|problem| {
            eprintln!("error: {problem}");
            ExitCode::from(2)
        });
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
    let stage = Stage::set(options.outlast).map_err(|problem| problem.to_string())?;
    let report = Bench::new(&stage, options.is_quick).run(&options.only);
    if options.is_json {
        println!("{}", report.to_json());
    } else {
        println!("{}", report.to_markdown());
    }
    Ok(())
}

fn read_options(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options { is_quick: false, is_json: false, only: Vec::new(), outlast: None };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("`{arg}` needs a value"));
        match arg.as_str() {
            "mcp" => {}
            "--quick" => options.is_quick = true,
            "--json" => options.is_json = true,
            "--only" => {
                for name in value()?.split(',') {
                    options.only.push(Phase::named(name).ok_or_else(|| format!("no benchmark `{name}`"))?);
                }
            }
            "--outlast" => options.outlast = Some(value()?.into()),
            other => return Err(format!("no option `{other}`")),
        }
    }
    if options.only.is_empty() {
        options.only = Phase::ALL.to_vec();
    }
    Ok(options)
}
