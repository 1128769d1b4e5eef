//! What several gateways as one cost, and how soon clients are served again when one of them is killed. One NATS server and
//! three replicas on loopback.

mod fault;
mod measure;
mod table;
mod team;

use std::path::PathBuf;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Small,
    Load,
    Owner,
    Sessions,
    Switch,
}

impl Phase {
    pub(super) const ALL: [Phase; 5] = [Phase::Small, Phase::Load, Phase::Owner, Phase::Sessions, Phase::Switch];

    pub(super) fn named(name: &str) -> Option<Phase> {
        Phase::ALL.into_iter().find(|phase| phase.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Phase::Small => "small",
            Phase::Load => "load",
            Phase::Owner => "owner",
            Phase::Sessions => "sessions",
            Phase::Switch => "switch",
        }
    }
}

struct Size {
    rounds: usize,
    small_calls: usize,
    load_calls: usize,
    /// Replicas that are killed, for each of the rows about that.
    kills: usize,
    switches: usize,
}

const FULL: Size = Size { rounds: 7, small_calls: 6_000, load_calls: 20_000, kills: 5, switches: 10 };
const QUICK: Size = Size { rounds: 3, small_calls: 400, load_calls: 2_000, kills: 1, switches: 2 };

/// The whole benchmark, as a report. A phase that fails is left out with a note.
pub(super) fn run(outlast: Option<PathBuf>, is_quick: bool, only: &[Phase]) -> Result<table::Report, String> {
    let stage = team::Stage::set(outlast).map_err(|problem| problem.to_string())?;
    let size = if is_quick { QUICK } else { FULL };
    let mut report = table::Report::default();
    for phase in only {
        eprintln!("{}", phase.name());
        let done = match phase {
            Phase::Small => measure::small(&stage, &size, &mut report),
            Phase::Load => measure::load(&stage, &size, &mut report),
            Phase::Owner => fault::owner(&stage, &size, &mut report),
            Phase::Sessions => fault::sessions(&stage, &size, &mut report),
            Phase::Switch => fault::switch(&stage, &size, &mut report),
        };
        if let Err(problem) = done {
            report.note(format!("`{}` is not complete: {problem}", phase.name()));
        }
    }
    Ok(report)
}
