//! The command that is told when a person is wanted: run with the event on its stdin, and never waited for.

use std::{
    collections::BTreeMap,
    io::IoSlice,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use bytes::{Buf, BytesMut};
use serde_json::Value;

use super::plan::{Place, Plan};
use crate::os::{self, Household, News, Order, Sink, Source, Stdio};

/// Keys of these processes; an agent's are small.
const KEYS: u64 = 1 << 62;
/// One more than so many at a time is not run.
const RUNNING_MAX: usize = 4;
/// One that takes longer is killed.
const TIME_MAX: Duration = Duration::from_secs(30);
/// What it writes is read so that it does not wait, and thrown away.
const READ_ROOM: usize = 4 << 10;

#[derive(Debug)]
pub(super) struct Hooks {
    command: Option<String>,
    running: BTreeMap<u64, Hook>,
    next: u64,
}

#[derive(Debug)]
struct Hook {
    stdin: Option<Sink>,
    event: BytesMut,
    outputs: Vec<Source>,
    /// None once it was killed.
    until: Option<Instant>,
}

impl Hooks {
    pub(super) fn new(command: Option<String>) -> Hooks {
        Hooks { command, running: BTreeMap::new(), next: KEYS }
    }

    pub(super) fn are_wanted(&self) -> bool {
        self.command.is_some()
    }

    /// A sentence if it cannot be run.
    pub(super) fn run(
        &mut self,
        event: &Value,
        plan: &Plan,
        place: &Place,
        household: &mut Household,
        now: Instant,
    ) -> Option<String> {
        let command = self.command.as_ref()?;
        if self.running.len() >= RUNNING_MAX {
            return Some(format!("{RUNNING_MAX} notifications run already, so `{}` is not told", event["event"]));
        }
        let key = self.next;
        self.next += 1;
        let name = event["event"].as_str().unwrap_or_default();
        let (program, flag) = os::SHELL;
        let order = Order {
            program: program.into(),
            args: vec![flag.into(), command.into()],
            cwd: place.cwd.path.clone(),
            env: vec![
                ("OUTLAST_SESSION".into(), plan.id.clone().into()),
                ("OUTLAST_EVENT".into(), name.to_owned().into()),
            ],
            tag: format!("{}.notify{}", plan.id, key - KEYS),
            env_is_all: false,
            stdio: Stdio::Piped,
            sandbox: None,
        };
        match household.spawn(key, &order) {
            Ok(pipes) => {
                let event = BytesMut::from(format!("{event}\n").as_bytes());
                let outputs = [pipes.stdout, pipes.stderr].into_iter().flatten().collect();
                let until = now.checked_add(TIME_MAX);
                self.running.insert(key, Hook { stdin: pipes.stdin, event, outputs, until });
                None
            }
            Err(error) => Some(format!("the notification cannot be run ({error})")),
        }
    }

    /// True if the news was of one of these; a sentence if it is worth one.
    pub(super) fn hear(&mut self, news: &News, household: &mut Household) -> Option<Option<String>> {
        let key = match news {
            News::Started { key, .. }
            | News::StartFailed { key, .. }
            | News::Exited { key, .. }
            | News::Swept { key }
            | News::Stopped { key } => *key,
            News::Noticed(_) | News::KeeperLost => return None,
        };
        if key < KEYS {
            return None;
        }
        Some(match news {
            News::StartFailed { error, .. } => {
                self.running.remove(&key);
                Some(format!("the notification cannot be run ({error})"))
            }
            News::Exited { exit, .. } => {
                household.sweep(key);
                let was_killed = self.running.get(&key).is_some_and(|hook| hook.until.is_none());
                match exit {
                    os::Exit::Code(0) => None,
                    _ if was_killed => {
                        Some(format!("the notification took over {} s and was killed", TIME_MAX.as_secs()))
                    }
                    os::Exit::Code(code) => Some(format!("the notification ended with exit code {code}")),
                    os::Exit::Signal(signal) => Some(format!("the notification ended by signal {signal}")),
                }
            }
            News::Swept { .. } => {
                self.running.remove(&key);
                None
            }
            _ => None,
        })
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.running.values().filter_map(|hook| hook.until).min()
    }

    pub(super) fn pass_time(&mut self, now: Instant, household: &mut Household) {
        for (key, hook) in &mut self.running {
            if hook.until.is_some_and(|until| until <= now) {
                hook.until = None;
                household.signal(*key, os::Signal::Kill);
            }
        }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        for hook in self.running.values_mut() {
            moved |= hook.poll(cx);
        }
        moved
    }
}

impl Hook {
    fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        while let Some(stdin) = &mut self.stdin {
            if self.event.is_empty() {
                self.stdin = None;
                break;
            }
            match stdin.poll_write(cx, &[IoSlice::new(&self.event)]) {
                Poll::Pending => break,
                Poll::Ready(Ok(count)) => self.event.advance(count),
                // It does not want to know.
                Poll::Ready(Err(_)) => self.event.clear(),
            }
            moved = true;
        }
        self.outputs.retain_mut(|output| {
            let mut space = BytesMut::with_capacity(READ_ROOM);
            match output.poll_read(cx, &mut space) {
                Poll::Pending => true,
                Poll::Ready(read) => {
                    moved = true;
                    read.is_ok_and(|count| count > 0)
                }
            }
        });
        moved
    }
}
