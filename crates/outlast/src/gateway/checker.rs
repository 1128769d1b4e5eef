//! Drives the process that compiles schemas and checks arguments (`outlast check-schemas`). It is a child like the
//! backends, starts with the first schema that is not made of plain types, and inherits nothing of outlast's
//! environment.

use std::ffi::OsString;

use bytes::Bytes;
use outlast_core::{
    checker::{self, Action, Order, Reply},
    exit::How,
    gateway::{self, Fit, Link},
    message,
};
use outlast_os as os;

use super::{Driver, links::WireKind};
use crate::{child::environment, cli::report};

pub(crate) mod process;

use process::Said;

/// The serial numbers of checker processes start here; those of links are smaller.
const FIRST: u64 = 1 << 62;
/// The prefix of its lines in the log.
const NAME: &str = "schema checker";

/// The checker process, if one runs, and the machine that decides about it.
#[derive(Default)]
pub(crate) struct Checker {
    pub machine: checker::Checker,
    /// The current process. A replaced one may take a moment to exit.
    current: Option<u64>,
    /// Counts the processes, also of earlier programs of this process.
    pub(super) started: u64,
}

/// Whether a child is the checker and not a backend.
pub(crate) fn is_checker(serial: u64) -> bool {
    serial >= FIRST
}

impl Driver {
    pub(super) fn tell_checker(&mut self, event: checker::Event) {
        let mut actions = Vec::new();
        self.checker.machine.handle(event, self.now, &mut actions);
        for action in actions {
            match action {
                Action::Start => self.start_checker(),
                Action::Tell(order) => {
                    if let Some(serial) = self.checker.current {
                        self.tell_child(serial, line(&order));
                    }
                }
                Action::Kill => self.end_checker(),
                Action::Decide { ticket, fit } => self.tell(gateway::Event::Checked { ticket, fit }),
            }
        }
    }

    fn start_checker(&mut self) {
        let serial = FIRST + self.checker.started;
        self.checker.started += 1;
        self.checker.current = Some(serial);
        let program = match own_program() {
            Ok(program) => program,
            Err(error) => return self.tell_checker(checker::Event::StartFailed(error.to_string())),
        };
        let cwd = self.plan.cwd.clone();
        // Windows does not start a program without its system variables.
        let env = match cfg!(windows) {
            true => environment::of_backend(environment::ours(), std::iter::empty(), &cwd).all,
            false => Vec::new(),
        };
        let order = os::Order {
            program,
            args: vec!["check-schemas".into()],
            env,
            env_is_all: true,
            cwd,
            tag: format!("{}.checker.{}", self.plan.id, self.checker.started),
            stdio: os::Stdio::Piped,
            sandbox: None,
            live_until: None,
        };
        match self.children.start(serial, &order, self.plan.grace) {
            Ok(()) => {
                let link = Link { backend: u32::MAX, serial };
                self.add_wire(link, WireKind::Child { backend: NAME.to_owned(), diverted: 0 });
            }
            Err(error) => self.tell_checker(checker::Event::StartFailed(report::plain(&error.to_string()))),
        }
    }

    /// Kills the process: it has no work to finish.
    pub(super) fn end_checker(&mut self) {
        if let Some(serial) = self.checker.current {
            self.disconnect(serial, true);
        }
    }

    pub(super) fn checker_said(&mut self, serial: u64, line: &[u8]) {
        if self.checker.current != Some(serial) {
            return;
        }
        let event = match serde_json::from_slice(line) {
            Ok(Said::Ready) => checker::Event::Ready,
            Ok(Said::Compiled) => checker::Event::Replied(Reply::Compiled),
            Ok(Said::Unusable(why)) => checker::Event::Replied(Reply::Unusable(why)),
            Ok(Said::Fits) => checker::Event::Replied(Reply::Evaluated(Fit::Fits)),
            Ok(Said::Misfit(why)) => checker::Event::Replied(Reply::Evaluated(Fit::Misfit(why))),
            Ok(Said::TooCostly) => checker::Event::Replied(Reply::Evaluated(Fit::TooCostly)),
            Err(_) => return self.end_checker(),
        };
        self.tell_checker(event);
    }

    /// The process has exited.
    pub(super) fn checker_gone(&mut self, serial: u64, how: How) {
        if self.checker.current.take_if(|current| *current == serial).is_some() {
            self.tell_checker(match how {
                How::CouldNotStart(why) => checker::Event::StartFailed(why),
                _ => checker::Event::Exited,
            });
        }
    }
}

/// One line for each order; schemas and arguments may have contained line feeds.
fn line(order: &Order) -> Bytes {
    let (letter, key, json) = match order {
        Order::Compile { key, schema } => ('C', key, schema),
        Order::Evaluate { key, arguments } => ('E', key, arguments),
        Order::Forget => return Bytes::from_static(b"F\n"),
    };
    message::patch(&[format!("{letter} {key} ").as_bytes(), json].concat(), &mut [])
}

/// The program that runs now, even if its file was replaced.
fn own_program() -> std::io::Result<OsString> {
    match cfg!(target_os = "linux") {
        true => Ok("/proc/self/exe".into()),
        false => std::env::current_exe().map(Into::into),
    }
}
