//! Notifications: each command is run with the event on its stdin, and never waited for. A POST is sent by a process of
//! its own (`outlast post-event`), so that neither names, connections nor TLS are part of the session's loop and memory.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    task::Context,
    time::{Duration, Instant},
};

use outlast_core::{
    exit::{Exit, How},
    life::Grace,
};
use outlast_os::{self as os, Order, Stdio};
use serde_json::Value;

use super::plan::{Form, Plan, Receiver, StartContext};
use crate::{child::Children, operator::post_event};

/// Process keys of notify commands; an agent's keys are small.
const KEYS: u64 = 1 << 62;
/// Commands at a time; one more is not run.
const RUNNING_MAX: usize = 4;
/// A command that takes longer is killed.
const TIME_MAX: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Hooks {
    receivers: Vec<Receiver>,
    running: BTreeMap<u64, Hook>,
    next: u64,
}

/// One that runs.
#[derive(Debug)]
struct Hook {
    /// When it is killed; `None` once it was.
    until: Option<Instant>,
    /// It writes why it failed: the output of a command of the user is discarded instead.
    is_read: bool,
    /// Its last line.
    said: String,
}

/// Whether a child is a notify command and not the agent.
pub(super) fn is_hook(key: u64) -> bool {
    key >= KEYS
}

impl Hooks {
    pub(super) fn new(receivers: Vec<Receiver>) -> Hooks {
        Hooks { receivers, running: BTreeMap::new(), next: KEYS }
    }

    /// A notification is being sent.
    #[cfg(unix)]
    pub(super) fn are_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// The number of the next notification, for the next program.
    #[cfg(unix)]
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    #[cfg(unix)]
    pub(super) fn go_on(&mut self, next: u64) {
        self.next = next.max(KEYS);
    }

    pub(super) fn are_wanted(&self) -> bool {
        !self.receivers.is_empty()
    }

    /// An error message for each receiver that cannot be told.
    pub(super) fn run(
        &mut self,
        event: &Value,
        plan: &Plan,
        place: &StartContext,
        children: &mut Children,
        now: Instant,
    ) -> Vec<String> {
        let receivers = self.receivers.clone();
        let told = receivers.iter().map(|receiver| self.run_one(receiver, event, plan, place, children, now));
        told.filter_map(Result::err).collect()
    }

    fn run_one(
        &mut self,
        receiver: &Receiver,
        event: &Value,
        plan: &Plan,
        place: &StartContext,
        children: &mut Children,
        now: Instant,
    ) -> Result<(), String> {
        let failed = |error: io::Error| format!("the notification cannot be run ({error})");
        let name = event["event"].as_str().unwrap_or_default();
        if self.running.len() >= RUNNING_MAX {
            return Err(format!("{RUNNING_MAX} notifications are already running, so none is run for `{name}`"));
        }
        let key = self.next;
        self.next += 1;
        let mut env: Vec<(OsString, OsString)> =
            vec![("OUTLAST_SESSION".into(), plan.id.clone().into()), ("OUTLAST_EVENT".into(), name.to_owned().into())];
        let (program, args, stdio): (OsString, Vec<OsString>, Stdio) = match receiver {
            Receiver::Command(command) => {
                let (program, flag) = os::SHELL;
                (program.into(), vec![flag.into(), command.into()], Stdio::Input)
            }
            // The address may contain a key, and the arguments of a process can be seen by all users.
            Receiver::Post { url, form } => {
                env.push((post_event::URL.into(), url.into()));
                env.push((post_event::FORM.into(), if *form == Form::Ntfy { post_event::NTFY } else { "json" }.into()));
                (std::env::current_exe().map_err(failed)?.into(), vec!["post-event".into()], Stdio::Piped)
            }
        };
        let is_read = matches!(receiver, Receiver::Post { .. });
        let order = Order {
            program,
            args,
            cwd: place.cwd.path.clone(),
            env,
            tag: format!("{}.notify{}", plan.id, key - KEYS),
            env_is_all: false,
            stdio,
            sandbox: None,
            live_until: None,
        };
        children.start(key, &order, Grace::default()).map_err(failed)?;
        if let Some(child) = children.get_mut(key) {
            // It need not read its stdin.
            child.let_close_pipes();
            child.put(format!("{event}\n").into(), None);
            child.finish_stdin();
        }
        self.running.insert(key, Hook { until: now.checked_add(TIME_MAX), is_read, said: String::new() });
        Ok(())
    }

    /// Reads what the processes that send a POST write.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, children: &mut Children, now: Instant) -> bool {
        let mut has_more = false;
        for (key, _) in self.running.iter().filter(|(_, hook)| hook.is_read) {
            has_more |= children.poll_output(*key, true, cx, now);
        }
        has_more
    }

    /// A line of its stderr.
    pub(super) fn said(&mut self, key: u64, line: &str) {
        if let Some(hook) = self.running.get_mut(&key).filter(|_| !line.trim().is_empty()) {
            hook.said = format!(": {}", line.trim());
        }
    }

    /// A sentence for the log.
    pub(super) fn start_failed(&mut self, key: u64, error: &io::Error) -> String {
        self.running.remove(&key);
        format!("the notification cannot be run ({error})")
    }

    /// A sentence for the log, if the command failed.
    pub(super) fn ended(&self, key: u64, how: &How) -> Option<String> {
        let hook = self.running.get(&key);
        let was_killed = hook.is_some_and(|hook| hook.until.is_none());
        let said = hook.map_or("", |hook| hook.said.as_str());
        match how {
            How::Exited(Exit::Code(0)) => None,
            _ if was_killed => Some(format!("the notification took over {} s and was killed", TIME_MAX.as_secs())),
            How::Exited(Exit::Code(code)) => Some(format!("the notification ended with exit code {code}{said}")),
            How::Exited(Exit::Signal(signal)) => Some(format!("the notification ended by signal {signal}")),
            how => Some(format!("the notification ended: {how}")),
        }
    }

    pub(super) fn cleared(&mut self, key: u64) {
        self.running.remove(&key);
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.running.values().filter_map(|hook| hook.until).min()
    }

    pub(super) fn time_passed(&mut self, now: Instant, children: &mut Children) {
        for (key, hook) in &mut self.running {
            if hook.until.take_if(|until| *until <= now).is_some() {
                children.kill(*key, now);
            }
        }
    }
}
