//! The cost of a gateway over HTTP, compared with the bare server, with a minimal HTTP hop, and with other gateways.

pub(super) mod client;
mod hostile;
pub(super) mod lists;
pub(super) mod measure;
pub(super) mod subject;
mod table;

use std::path::PathBuf;

pub(super) use measure::Phase;

/// The whole benchmark, as a report.
pub(super) fn run(outlast: Option<PathBuf>, is_quick: bool, only: &[Phase]) -> Result<table::Report, String> {
    let stage = subject::Stage::set(outlast).map_err(|problem| problem.to_string())?;
    Ok(measure::Bench::new(&stage, is_quick).run(only))
}
