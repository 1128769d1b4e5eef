//! `outlast check-state`: proves that this program can continue with the state of a running instance. The state is on stdin;
//! the arguments are those of the instance, as its options are read again.

use std::{ffi::OsString, io, process::ExitCode};

use clap::{CommandFactory, FromArgMatches};
use outlast_os::handover;
use serde_json::json;

use super::{OWN_VERSION, format};
use crate::{
    cli::{
        self, commands,
        report::{self, Report},
    },
    config::flags::{fill_gateway, fill_mcp, fill_run, filled},
    gateway::begin,
    operator::instances,
};

pub(crate) fn check_state(arguments: &cli::CheckState) -> Result<ExitCode, Report> {
    let state = handover::read_state(&mut io::stdin().lock())
        .map_err(|error| Report::new(report::FAILURE, "cannot read the state").because(error))?;
    let args: Vec<OsString> = ["outlast".into()].into_iter().chain(arguments.args.iter().cloned()).collect();
    let parsed = cli::Cli::command().try_get_matches_from(&args);
    let (cli, given) = parsed
        .and_then(|given| Ok((cli::Cli::from_arg_matches(&given)?, given)))
        .map_err(|error| Report::of_arguments(error, &cli::Cli::command(), &args))?;
    let given = given.subcommand().map(|(_, given)| given);
    match cli.command {
        cli::Command::Mcp(arguments) => {
            filled(arguments, given, fill_mcp).and_then(|arguments| commands::check_mcp(&arguments, &state))?;
        }
        cli::Command::Run(mut arguments) => {
            arguments.options = cli::options_of_run(&args);
            filled(arguments, given, fill_run).and_then(|arguments| commands::check_session(&arguments, &state))?;
        }
        cli::Command::Gateway(arguments) => {
            filled(arguments, given, fill_gateway).and_then(|arguments| begin::check_gateway(&arguments, &state))?;
        }
        _ => return Err(Report::new(report::USAGE, "this command has no state")),
    }
    instances::print(&format!("{}\n", json!({"outlast": OWN_VERSION, "state": format::version()})))
}
