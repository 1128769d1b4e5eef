//! What a gateway over HTTP costs, side by side with the bare server, with a hop that does nothing else, and with others.

mod client;
mod hostile;
mod measure;
mod subject;
mod table;

use std::path::PathBuf;

pub use measure::Phase;

/// The whole benchmark, as a report.
pub fn run(outlast: Option<PathBuf>, is_quick: bool, only: &[Phase]) -> Result<table::Report, String> {
    let stage = subject::Stage::set(outlast).map_err(|problem| problem.to_string())?;
    Ok(measure::Bench::new(&stage, is_quick).run(only))
}
