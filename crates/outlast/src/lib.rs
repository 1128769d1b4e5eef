//! outlast: the connection outlasts the process. Drivers, the operating system, and words for people.

use std::{ffi::OsString, process::ExitCode};

use clap::{CommandFactory, Parser};

pub mod attach;
pub mod audit;
pub mod base64;
pub mod cli;
pub mod commands;
pub mod control;
pub mod cwd;
pub mod demo;
pub mod environment;
pub mod frontmatter;
pub mod history;
pub mod home;
pub mod inherit;
pub mod instances;
pub mod journal;
pub mod lines;
pub mod marker;
pub mod mcp;
pub mod os;
pub mod outbox;
pub mod report;
pub mod rollout;
pub mod sessions;
pub mod table;
pub mod terminal;
pub mod transcript;
pub mod watch;

/// The whole program, callable from a test.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match cli::Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => return report::Report::of_arguments(error, &cli::Cli::command()).print(),
    };
    let result = match cli.command {
        cli::Command::Mcp(arguments) => commands::mcp(arguments),
        cli::Command::Run(arguments) => commands::run(arguments),
        cli::Command::Ps(arguments) => instances::ps(&arguments),
        cli::Command::State(which) => instances::state(&which),
        cli::Command::Pid(which) => instances::pid(&which),
        cli::Command::Restart(arguments) => instances::restart(&arguments),
        cli::Command::Inject(arguments) => instances::inject(&arguments),
        cli::Command::Send(arguments) => sessions::send(&arguments),
        cli::Command::Screen(arguments) => sessions::screen(&arguments),
        cli::Command::WaitFor(arguments) => sessions::wait_for(&arguments),
        cli::Command::Attach(arguments) => attach::run(&arguments),
        cli::Command::Stop(arguments) => instances::stop(&arguments),
        cli::Command::Resume(which) => instances::resume(&which),
        cli::Command::Logs(arguments) => history::logs(&arguments),
        cli::Command::Audit(arguments) => history::audit(&arguments),
        cli::Command::Demo(arguments) => demo::run(&arguments),
        cli::Command::DemoServer(arguments) => Ok(demo::serve(&arguments.file)),
    };
    result.unwrap_or_else(|report| report.print())
}
