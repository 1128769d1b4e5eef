//! What children hold in memory, looked at from time to time and only where there is a limit.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use tokio::task::JoinHandle;

use crate::os;

/// Between two looks. A look reads the process table, which takes about a millisecond, and so does it elsewhere.
const EVERY: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub struct Scale {
    due: Option<Instant>,
    weighing: Option<Weighing>,
}

/// A look that is under way.
#[derive(Debug)]
struct Weighing {
    keys: Vec<u64>,
    found: JoinHandle<Option<Vec<u64>>>,
}

impl Scale {
    /// There are children to be weighed, or there are none.
    pub fn set(&mut self, is_needed: bool, now: Instant) {
        match is_needed {
            true => {
                self.due.get_or_insert(now + EVERY);
            }
            false => self.due = None,
        }
    }

    pub fn deadline(&self) -> Option<Instant> {
        self.due.filter(|_| self.weighing.is_none())
    }

    /// Begins a look, of children by their keys and processes.
    pub fn weigh(&mut self, children: Vec<(u64, u32)>, now: Instant) {
        self.due = Some(now + EVERY);
        let (keys, pids): (Vec<u64>, Vec<u32>) = children.into_iter().unzip();
        self.weighing = Some(Weighing { keys, found: tokio::task::spawn_blocking(move || os::weigh(&pids)) });
    }

    /// What was found, by key. Where the system does not tell, nothing.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Vec<(u64, u64)>> {
        let Some(weighing) = &mut self.weighing else { return Poll::Pending };
        let Poll::Ready(found) = Pin::new(&mut weighing.found).poll(cx) else { return Poll::Pending };
        let keys = std::mem::take(&mut weighing.keys);
        self.weighing = None;
        Poll::Ready(keys.into_iter().zip(found.ok().flatten().unwrap_or_default()).collect())
    }
}
