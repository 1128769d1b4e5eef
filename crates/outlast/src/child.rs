//! Drives child processes: starts and stops them by core's `Life`, reads what they write, and writes what is queued for
//! them. What a child says, and when it is started again, is decided by the machines of the drivers that use this.

pub(crate) mod environment;
pub(crate) mod lines;
pub(crate) mod memory_watch;
pub(crate) mod outbox;
pub(crate) mod own_streams;
mod process;
mod tail;
pub(crate) mod timer;
pub(crate) mod wake_flag;
pub(crate) mod watch;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io,
    task::{Context, Poll, Waker},
    time::Instant,
};

use bytes::{Bytes, BytesMut};
use outlast_core::{
    exit::How,
    life::{self, Grace},
};
use outlast_os::{BootTime, ChildProcesses, News, Order, Signal};
#[cfg(unix)]
use outlast_os::{
    Keeper, KeeperProtocol, SavedChildProcesses,
    handover::{Handover, Received},
};
#[cfg(unix)]
use serde::{Deserialize, Serialize};

use self::process::Around;
pub(crate) use self::process::Child;

/// Reads of one stream in one turn of the loop, so that no source starves the others. Stderr is read once: its lines
/// cost more.
const READS_MAX: usize = 4;
/// How many lines of one child are passed on in one turn of the loop, and how large they may be together: then it is the turn
/// of other children. A longer line is passed on alone.
const LINES_MAX: usize = 256;
const LINES_BYTES_MAX: usize = 256 << 10;

/// The children of one driver, by key. It does not poll by itself: the driver polls reports, output and queues, and takes
/// the events after each poll.
#[derive(Debug)]
pub(crate) struct Children {
    processes: ChildProcesses,
    /// Of the last poll for reports. `ChildProcesses` sends some requests only when it is polled.
    waker: Option<Waker>,
    children: BTreeMap<u64, Child>,
    /// Keys of children that wait for a deadline.
    with_deadline: BTreeSet<u64>,
    /// Bounded by one poll: the driver takes them before it polls again.
    events: VecDeque<ChildEvent>,
    /// Events of the children that the driver does not listen to now. The driver reads nothing from these, so there are few:
    /// what was left in the pipes at the end.
    held: BTreeMap<u64, VecDeque<ChildEvent>>,
}

/// For each key: `StartFailed`, or `Started`, then lines, `Gone` and `Cleared`.
#[derive(Debug)]
pub(crate) enum ChildEvent {
    Started {
        key: u64,
        pid: u32,
    },
    StartFailed {
        key: u64,
        error: io::Error,
    },
    /// A line of stdout, with its line feed.
    Said {
        key: u64,
        line: Bytes,
    },
    /// A line of stderr; `redacted` is for clients and operators.
    Logged {
        key: u64,
        text: String,
        redacted: String,
    },
    /// No output follows. The process may still run, but it is being stopped.
    Gone {
        key: u64,
        how: How,
        /// The marked lines that the child cannot have read, in order.
        unsent: Vec<(u64, Bytes)>,
    },
    /// No process of it is left.
    Cleared {
        key: u64,
    },
    /// A child with a terminal has stopped itself, as at Ctrl-Z, and waits for [`Children::resume`].
    Suspended {
        key: u64,
    },
    /// A sentence for the log.
    Noticed(String),
}

impl ChildEvent {
    fn key(&self) -> Option<u64> {
        match self {
            ChildEvent::Started { key, .. }
            | ChildEvent::StartFailed { key, .. }
            | ChildEvent::Said { key, .. }
            | ChildEvent::Logged { key, .. }
            | ChildEvent::Gone { key, .. }
            | ChildEvent::Cleared { key }
            | ChildEvent::Suspended { key } => Some(*key),
            ChildEvent::Noticed(_) => None,
        }
    }
}

impl Children {
    pub(crate) fn new(processes: ChildProcesses) -> Children {
        Children {
            processes,
            waker: None,
            children: BTreeMap::new(),
            with_deadline: BTreeSet::new(),
            events: VecDeque::new(),
            held: BTreeMap::new(),
        }
    }

    /// Requests the start and does not wait for it.
    pub(crate) fn start(&mut self, key: u64, order: &Order, grace: Grace) -> io::Result<()> {
        let pipes = self.processes.spawn(key, order)?;
        self.children.insert(key, Child::new(key, pipes, grace));
        self.waker.iter().for_each(Waker::wake_by_ref);
        Ok(())
    }

    /// Closes stdin, then SIGTERM, then SIGKILL. `How::Stopped` for a requested stop; otherwise what the child did
    /// wrong.
    pub(crate) fn stop(&mut self, key: u64, how: How, now: Instant) {
        self.with(key, now, |child, around| child.live(life::Event::StopAsked(how), around));
    }

    pub(crate) fn kill(&mut self, key: u64, now: Instant) {
        self.with(key, now, |child, around| child.live(life::Event::KillAsked, around));
    }

    pub(crate) fn kill_all(&mut self, now: Instant) {
        self.with_each(now, |child, around| child.live(life::Event::KillAsked, around));
    }

    /// Moves the end of the child's lease to a later moment, if it has a lease that has not ended.
    pub(crate) fn extend(&mut self, key: u64, until: BootTime) {
        self.processes.extend(key, until);
    }

    pub(crate) fn get(&self, key: u64) -> Option<&Child> {
        self.children.get(&key)
    }

    pub(crate) fn get_mut(&mut self, key: u64) -> Option<&mut Child> {
        self.children.get_mut(&key)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Child> {
        self.children.values()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Child> {
        self.children.values_mut()
    }

    /// The keys and process ids of the children that run.
    pub(crate) fn running(&self) -> impl Iterator<Item = (u64, u32)> {
        let running = self.children.iter().filter(|(_, child)| !child.has_exited());
        running.filter_map(|(key, child)| Some((*key, child.pid()?)))
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = u64> {
        self.children.keys().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.children.is_empty()
    }

    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// The next event. Lines that were queued for a child before this event are among the unsent ones.
    pub(crate) fn next_event(&mut self) -> Option<ChildEvent> {
        let mut event = loop {
            let event = self.events.pop_front()?;
            match event.key().and_then(|key| self.held.get_mut(&key)) {
                Some(held) => held.push_back(event),
                None => break event,
            }
        };
        match &mut event {
            ChildEvent::Gone { key, unsent, .. } => {
                *unsent = self.get_mut(*key).map(Child::close).unwrap_or_default();
            }
            ChildEvent::Cleared { key } => drop(self.children.remove(key)),
            _ => {}
        }
        Some(event)
    }

    /// Until [`Children::release`], no event of this child is returned. Lines can still be queued for it.
    pub(crate) fn hold(&mut self, key: u64) {
        self.held.entry(key).or_default();
    }

    /// The events of this child that were held are the next ones.
    pub(crate) fn release(&mut self, key: u64) {
        if let Some(mut held) = self.held.remove(&key) {
            held.append(&mut self.events);
            self.events = held;
        }
    }

    /// Takes one report of `ChildProcesses`. False if there is none.
    pub(crate) fn poll_news(&mut self, cx: &mut Context<'_>, now: Instant) -> bool {
        if self.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            self.waker = Some(cx.waker().clone());
        }
        let Poll::Ready(news) = self.processes.poll_news(cx) else { return false };
        match news {
            News::Started { key, pid } => {
                self.with(key, now, |child, around| child.live(life::Event::Started { pid }, around));
            }
            News::StartFailed { key, error } => {
                self.children.remove(&key);
                self.events.push_back(ChildEvent::StartFailed { key, error });
            }
            News::Exited { key, exit } => {
                self.with(key, now, |child, around| child.exited(exit, around));
            }
            News::LeaseEnded { key } => {
                self.with(key, now, |child, around| child.live(life::Event::LeaseEnded, around));
            }
            News::Swept { key } => {
                self.with(key, now, |child, around| child.swept(around));
            }
            News::Stopped { key } => self.events.push_back(ChildEvent::Suspended { key }),
            News::Noticed(sentence) => self.events.push_back(ChildEvent::Noticed(sentence)),
        }
        true
    }

    /// Reads the output of a child, line by line. Its stdout is read only if the lines can be passed on, or if the
    /// child has exited. True if there may be more at once.
    pub(crate) fn poll_output(&mut self, key: u64, reads_stdout: bool, cx: &mut Context<'_>, now: Instant) -> bool {
        self.with(key, now, |child, around| child.poll_output(reads_stdout, cx, around)).unwrap_or(false)
    }

    /// Like [`Children::poll_output`], for all of them.
    pub(crate) fn poll_outputs(&mut self, reads_stdout: bool, cx: &mut Context<'_>, now: Instant) -> bool {
        let mut has_more = false;
        self.with_each(now, |child, around| has_more |= child.poll_output(reads_stdout, cx, around));
        has_more
    }

    /// Reads the terminal of a child. `None`: its output has ended.
    pub(crate) fn poll_terminal(
        &mut self,
        key: u64,
        into: &mut BytesMut,
        cx: &mut Context<'_>,
        now: Instant,
    ) -> Poll<Option<usize>> {
        self.with(key, now, |child, around| child.poll_terminal(into, cx, around)).unwrap_or(Poll::Pending)
    }

    /// Writes what a child's stdin accepts.
    pub(crate) fn flush(&mut self, key: u64, cx: &mut Context<'_>, now: Instant) {
        self.with(key, now, |child, around| child.flush(cx, around));
    }

    pub(crate) fn flush_all(&mut self, cx: &mut Context<'_>, now: Instant) {
        self.with_each(now, |child, around| child.flush(cx, around));
    }

    /// Continues a child that has stopped itself.
    pub(crate) fn resume(&mut self, key: u64) {
        self.processes.signal(key, Signal::Continue);
    }

    /// Ends all children at once, and waits for the keeper to exit.
    pub(crate) async fn close(self) {
        self.processes.close().await;
    }

    /// When to call [`Children::time_passed`].
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.with_deadline.iter().filter_map(|key| self.children.get(key)?.deadline()).min()
    }

    pub(crate) fn time_passed(&mut self, now: Instant) {
        for key in self.with_deadline.iter().copied().collect::<Vec<_>>() {
            self.with(key, now, Child::time_passed);
        }
    }

    fn with<T>(&mut self, key: u64, now: Instant, act: impl FnOnce(&mut Child, &mut Around<'_>) -> T) -> Option<T> {
        let child = self.children.get_mut(&key)?;
        let (processes, waker, events) = (&mut self.processes, self.waker.as_ref(), &mut self.events);
        let result = act(child, &mut Around { processes, waker, events, now });
        note_deadline(&mut self.with_deadline, key, child);
        Some(result)
    }

    fn with_each(&mut self, now: Instant, mut act: impl FnMut(&mut Child, &mut Around<'_>)) {
        let (processes, waker, events) = (&mut self.processes, self.waker.as_ref(), &mut self.events);
        let mut around = Around { processes, waker, events, now };
        for (key, child) in &mut self.children {
            act(child, &mut around);
            note_deadline(&mut self.with_deadline, *key, child);
        }
    }
}

/// The children of a driver as saved state.
#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedChildren {
    keeper: KeeperProtocol,
    /// `None` in a state that is only to be checked: `ChildProcesses` is saved while it is paused.
    #[serde(rename = "household")]
    processes: Option<SavedChildProcesses>,
    children: Vec<process::SavedChild>,
}

#[cfg(unix)]
impl SavedChildren {
    /// The keys of the children.
    pub(crate) fn keys(&self) -> impl Iterator<Item = u64> {
        self.children.iter().map(process::SavedChild::key)
    }

    /// Whether this program can speak with the keeper. Its version is known in a state that is only to be checked, too.
    pub(crate) fn check(&self) -> io::Result<()> {
        self.keeper.check()
    }
}

#[cfg(unix)]
impl Children {
    /// A child is being started or stopped, or has exited: they cannot be saved.
    pub(crate) fn is_busy(&self) -> bool {
        !self.events.is_empty()
            || !self.held.is_empty()
            || self.processes.is_busy()
            || self.children.values().any(Child::is_moving)
    }

    /// Ready when no message between outlast and the monitors is under way. [`Children::unpause`] follows, or another
    /// program.
    pub(crate) fn poll_pause(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.processes.poll_pause(cx)
    }

    pub(crate) fn unpause(&mut self) {
        self.processes.resume();
    }

    /// `None` while [`Children::is_busy`].
    pub(crate) fn save(&self, handover: &mut Handover) -> Option<SavedChildren> {
        let processes = Some(self.processes.save(handover)?);
        Some(SavedChildren { processes, ..self.sketch(handover)? })
    }

    /// The state without `ChildProcesses`, to be checked.
    pub(crate) fn sketch(&self, handover: &mut Handover) -> Option<SavedChildren> {
        let children = self.children.values().map(|child| child.save(handover)).collect::<Option<Vec<_>>>()?;
        Some(SavedChildren { keeper: self.processes.protocol(), processes: None, children })
    }

    /// The same without the children that are being started or stopped.
    pub(crate) fn sketch_of_running(&self, handover: &mut Handover) -> SavedChildren {
        let children = self.children.values().filter_map(|child| child.save(handover)).collect();
        SavedChildren { keeper: self.processes.protocol(), processes: None, children }
    }

    /// Takes over the children of the last program of this process. Must be called within the runtime.
    pub(crate) fn restore(saved: SavedChildren, received: &mut Received, grace: Grace) -> io::Result<Children> {
        let processes = saved.processes.ok_or_else(|| io::Error::other("the state has no keeper"))?;
        let mut children = Children::new(Keeper::restore(processes, saved.keeper, received)?);
        for child in saved.children {
            let child = Child::restore(child, received, grace)?;
            children.children.insert(child.key(), child);
        }
        Ok(children)
    }
}

fn note_deadline(with_deadline: &mut BTreeSet<u64>, key: u64, child: &Child) {
    match child.deadline() {
        Some(_) => drop(with_deadline.insert(key)),
        None => drop(with_deadline.remove(&key)),
    }
}
