//! Measures how much memory children use, at intervals and only if there is a limit. What happens above the limit is
//! decided in core.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use outlast_os::{
    self as os,
    offload::{Task, offload},
};

/// Between two measurements. Each reads the process table, which takes about a millisecond, in another thread.
const EVERY: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct MemoryWatch {
    due: Option<Instant>,
    running: Option<Measurement>,
}

/// A measurement that runs.
#[derive(Debug)]
struct Measurement {
    keys: Vec<u64>,
    found: Task<Option<Vec<u64>>>,
}

impl MemoryWatch {
    /// Whether there are children to measure.
    pub(crate) fn set(&mut self, is_needed: bool, now: Instant) {
        match is_needed {
            true => {
                self.due.get_or_insert(now + EVERY);
            }
            false => self.due = None,
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.due.filter(|_| self.running.is_none())
    }

    /// Starts a measurement of children, by their keys and process ids.
    pub(crate) fn measure(&mut self, children: Vec<(u64, u32)>, now: Instant) {
        self.due = Some(now + EVERY);
        let (keys, pids): (Vec<u64>, Vec<u32>) = children.into_iter().unzip();
        self.running = Some(Measurement { keys, found: offload(move || os::weigh(&pids)) });
    }

    /// The bytes that each child uses, by key. Empty where the system does not report them.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Vec<(u64, u64)>> {
        let Some(running) = &mut self.running else { return Poll::Pending };
        let Poll::Ready(found) = Pin::new(&mut running.found).poll(cx) else { return Poll::Pending };
        let keys = std::mem::take(&mut running.keys);
        self.running = None;
        Poll::Ready(keys.into_iter().zip(found.ok().flatten().unwrap_or_default()).collect())
    }
}
