//! The lease of a child: a thread of outlast ends the child's job at the end of the lease.
//!
//! Windows has no monitor processes, so the lease is kept while the loop of outlast hangs, but not while all threads of
//! outlast are suspended. The job ends with outlast, so a child never outlives it.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, Thread},
    time::Duration,
};

use tokio::sync::mpsc::UnboundedSender;

use super::job::Job;
use crate::{BootTime, News};

/// How long the thread waits at most before it reads the clock again: a wait does not count time in suspend.
const LOOK_MAX: Duration = Duration::from_millis(100);

/// In place of the end of a lease: it has ended.
const ENDED: u64 = 0;
/// In place of the end of a lease: its child is gone.
const RELEASED: u64 = u64::MAX;

/// Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Lease {
    /// In milliseconds, or one of the numbers above.
    end: Arc<AtomicU64>,
    thread: Thread,
}

impl Lease {
    pub(super) fn begin(key: u64, until: BootTime, job: Arc<Job>, tell: UnboundedSender<News>) -> io::Result<Lease> {
        if until.is_past() {
            return Err(io::Error::other("its lease ended before it was started"));
        }
        let end = Arc::new(AtomicU64::new(milliseconds(until)));
        let shared = Arc::clone(&end);
        let watch = move || {
            loop {
                let until = shared.load(Ordering::Acquire);
                if until == RELEASED {
                    return;
                }
                let left = moment(until).left();
                if !left.is_zero() {
                    thread::park_timeout(left.min(LOOK_MAX));
                } else if shared.compare_exchange(until, ENDED, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                    // Reported before the exit is. The receiver is gone if `ChildProcesses` was dropped.
                    let _ = tell.send(News::LeaseEnded { key });
                    break;
                }
            }
            // Again and again: the process may be put into the job only now.
            while shared.load(Ordering::Acquire) != RELEASED {
                job.terminate();
                thread::park_timeout(LOOK_MAX);
            }
        };
        let thread = thread::Builder::new().name("outlast-lease".into()).spawn(watch)?.thread().clone();
        Ok(Lease { end, thread })
    }

    /// An end that has come is final.
    pub(super) fn extend(&self, until: BootTime) {
        let until = milliseconds(until);
        let _ = self.end.fetch_update(Ordering::AcqRel, Ordering::Acquire, |end| {
            (end != ENDED && end < until && !moment(end).is_past()).then_some(until)
        });
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.end.store(RELEASED, Ordering::Release);
        self.thread.unpark();
    }
}

fn milliseconds(moment: BootTime) -> u64 {
    u64::try_from(moment.0.as_millis()).unwrap_or(u64::MAX).clamp(ENDED + 1, RELEASED - 1)
}

fn moment(milliseconds: u64) -> BootTime {
    BootTime(Duration::from_millis(milliseconds))
}
