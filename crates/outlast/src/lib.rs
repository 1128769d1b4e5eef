//! outlast: the connection outlasts the process. Drivers, the operating system, and words for people.

use std::{ffi::OsString, process::ExitCode};

use clap::{ArgMatches, CommandFactory, FromArgMatches};

pub mod agent_event;
pub mod attach;
pub mod audit;
pub mod base64;
pub mod cli;
pub mod commands;
pub mod completions;
pub mod config;
pub mod control;
pub mod cwd;
pub mod demo;
pub mod doctor;
pub mod duration;
pub mod environment;
pub mod frontmatter;
pub mod gateway;
pub mod help;
pub mod history;
pub mod home;
pub mod inherit;
pub mod instances;
pub mod journal;
pub mod lines;
pub mod logs;
pub mod marker;
pub mod mcp;
pub mod memory_watch;
pub mod offload;
pub mod os;
pub mod outbox;
pub mod paint;
pub mod report;
pub mod rollout;
pub mod session_record;
pub mod sessions;
pub mod start_cache;
pub mod table;
pub mod terminal;
pub mod top;
pub mod transcript;
pub mod watch;
pub mod wrap;

/// The whole program, callable from a test.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    #[cfg(unix)]
    os::Keeper::become_one_if_asked(&args);
    let parsed = cli::Cli::command().try_get_matches_from(&args);
    let (cli, given) = match parsed.and_then(|given| Ok((cli::Cli::from_arg_matches(&given)?, given))) {
        Ok(parsed) => parsed,
        Err(error) => return report::Report::of_arguments(error, &cli::Cli::command(), &args).print(),
    };
    let is_for_programs = wants_json(&given);
    let given = given.subcommand().map(|(_, given)| given);
    let result = match cli.command {
        cli::Command::Mcp(arguments) => config::flags::mcp(arguments, given).and_then(commands::mcp),
        cli::Command::Gateway(arguments) => gateway::begin::gateway(&config::flags::gateway(arguments, given)),
        cli::Command::Run(arguments) => config::flags::run(arguments, given).and_then(commands::run),
        cli::Command::Config(arguments) => config::commands::run(&arguments),
        cli::Command::Trust(arguments) => config::trust_command::run(&arguments),
        cli::Command::Ps(arguments) => instances::ps(&arguments),
        cli::Command::State(which) => instances::state(&which),
        cli::Command::Pid(which) => instances::pid(&which),
        cli::Command::Restart(arguments) => instances::restart(&arguments),
        cli::Command::Switch(arguments) => instances::switch(&arguments),
        cli::Command::Reload(which) => instances::reload(&which),
        cli::Command::Inject(arguments) => instances::inject(&arguments),
        cli::Command::Send(arguments) => sessions::send(&arguments),
        cli::Command::Screen(arguments) => sessions::screen(&arguments),
        cli::Command::WaitFor(arguments) => sessions::wait_for(&arguments),
        cli::Command::Attach(arguments) => attach::run(&arguments),
        cli::Command::Stop(arguments) => instances::stop(&arguments),
        cli::Command::Resume(which) => instances::resume(&which),
        cli::Command::Logs(arguments) => history::logs(&arguments),
        cli::Command::Audit(arguments) => history::audit(&arguments),
        cli::Command::Top(arguments) => top::top(&arguments),
        cli::Command::Wrap(arguments) => wrap::wrap(&arguments),
        cli::Command::Unwrap(arguments) => wrap::unwrap(&arguments),
        cli::Command::Doctor(arguments) => doctor::doctor(&arguments),
        cli::Command::Demo(arguments) => demo::run(&arguments),
        cli::Command::Help(arguments) => help::help(&arguments),
        cli::Command::Completions(arguments) => completions::completions(&arguments),
        cli::Command::Man(arguments) => completions::man(&arguments),
        cli::Command::AgentEvent(arguments) => Ok(agent_event::deliver(&arguments)),
        cli::Command::Ids => completions::ids(),
        cli::Command::DemoServer(arguments) => Ok(demo::serve(&arguments.file)),
    };
    result.unwrap_or_else(|report| if is_for_programs { report.print_in_json() } else { report.print() })
}

/// Whether who asked reads one JSON value on stdout, so that a failure is to be one, too. What prints a line for each
/// record has only records there.
fn wants_json(given: &ArgMatches) -> bool {
    match given.subcommand() {
        Some(("logs" | "audit", _)) => false,
        Some((_, below)) => wants_json(below),
        None => given.try_get_one::<bool>("json").is_ok_and(|json| json == Some(&true)),
    }
}
