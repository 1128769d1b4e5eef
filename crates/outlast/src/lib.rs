//! outlast: the connection outlasts the process. Drivers and the user interface; what is public here is what its tests use.

use std::{ffi::OsString, process::ExitCode};

use clap::{ArgMatches, CommandFactory, FromArgMatches};

pub mod adopt;
mod agent;
mod child;
pub mod cli;
mod cluster;
mod config;
mod demo;
#[doc(hidden)]
pub mod fuzzed;
pub mod gateway;
mod operator;
mod relay;
#[cfg(unix)]
mod share;
mod state;
mod upgrade;

use agent::{agent_event, attach, restore, sessions};
use cli::{commands, completions, help, report::Report};
use config::flags::{fill_gateway, fill_mcp, fill_run, filled};
use operator::{doctor, history, instances, post_event, startup, top};

/// The whole program, callable from a test.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    #[cfg(unix)]
    outlast_os::Keeper::become_one_if_asked(&args);
    #[cfg(unix)]
    let received = match outlast_os::handover::Received::begin() {
        Ok(received) => received,
        Err(error) => return Report::new(cli::report::FAILURE, "cannot take over").because(error).print(),
    };
    let parsed = cli::Cli::command().try_get_matches_from(&args);
    let (cli, given) = match parsed.and_then(|given| Ok((cli::Cli::from_arg_matches(&given)?, given))) {
        Ok(parsed) => parsed,
        Err(error) => return Report::of_arguments(error, &cli::Cli::command(), &args).print(),
    };
    let is_for_programs = wants_json(&given);
    let given = given.subcommand().map(|(_, given)| given);
    let result = match cli.command {
        cli::Command::Mcp(arguments) => filled(arguments, given, fill_mcp).and_then(|arguments| {
            #[cfg(unix)]
            if let Some(received) = received {
                return commands::mcp_again(arguments, received);
            }
            commands::mcp(arguments)
        }),
        cli::Command::Gateway(arguments) => {
            let given = given.filter(|_| arguments.besides.is_none());
            filled(arguments, given, fill_gateway).and_then(|arguments| {
                #[cfg(unix)]
                if let Some(received) = received {
                    return gateway::begin::gateway_again(&arguments, received);
                }
                gateway::begin::gateway(&arguments)
            })
        }
        cli::Command::Run(mut arguments) => {
            arguments.options = cli::options_of_run(&args);
            filled(arguments, given, fill_run).and_then(|arguments| {
                #[cfg(unix)]
                if let Some(received) = received {
                    return commands::run_again(&arguments, received);
                }
                commands::run(arguments)
            })
        }
        cli::Command::Restore(arguments) => restore::restore(&arguments),
        cli::Command::Startup(arguments) => startup::startup(&arguments),
        cli::Command::Config(arguments) => config::commands::run(&arguments),
        cli::Command::Trust(arguments) => config::trust_command::run(&arguments),
        cli::Command::Ps(arguments) => instances::ps(&arguments),
        cli::Command::State(arguments) => instances::state(&arguments),
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
        cli::Command::Upgrade(arguments) => operator::upgrade::upgrade(&arguments),
        cli::Command::Resume(which) => instances::resume(&which),
        cli::Command::Logs(arguments) => history::logs(&arguments),
        cli::Command::Audit(arguments) => history::audit(&arguments),
        cli::Command::Top(arguments) => top::top(&arguments),
        cli::Command::Wrap(arguments) => adopt::wrap(&arguments),
        cli::Command::Unwrap(arguments) => adopt::unwrap(&arguments),
        cli::Command::Doctor(arguments) => doctor::doctor(&arguments),
        cli::Command::Demo(arguments) => demo::run(&arguments),
        cli::Command::Help(arguments) => help::help(&arguments),
        cli::Command::Completions(arguments) => completions::completions(&arguments),
        cli::Command::Man(arguments) => completions::man(&arguments),
        cli::Command::AgentEvent(arguments) => Ok(agent_event::deliver(&arguments)),
        cli::Command::PostEvent => post_event::post(),
        cli::Command::Ids => completions::ids(),
        cli::Command::CheckSchemas => Ok(gateway::checker::process::serve()),
        #[cfg(unix)]
        cli::Command::CheckState(arguments) => upgrade::check_state::check_state(&arguments),
        #[cfg(windows)]
        cli::Command::CheckState(_) => Err(Report::new(cli::report::FAILURE, upgrade::NOT_ON_WINDOWS)),
        cli::Command::DemoServer(arguments) => Ok(demo::serve(&arguments.file)),
    };
    result.unwrap_or_else(|report| if is_for_programs { report.print_in_json() } else { report.print() })
}

/// The same as a version of outlast that saves its state in another format, for tests of upgrades.
#[doc(hidden)]
pub fn main_of_next_version(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    #[cfg(unix)]
    upgrade::format::use_next();
    main(args)
}

/// Whether the command prints one JSON value on stdout, so that a failure is printed as one, too. A command that prints
/// a line for each record prints only records.
fn wants_json(given: &ArgMatches) -> bool {
    match given.subcommand() {
        Some(("logs" | "audit", _)) => false,
        Some((_, below)) => wants_json(below),
        None => given.try_get_one::<bool>("json").is_ok_and(|json| json == Some(&true)),
    }
}
