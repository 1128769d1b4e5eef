//! A waker that notes that it fired. A loop polls its rare sources (signals, control socket, files) with it, and only after it
//! fired, so that they cost nothing while calls pass.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Wake, Waker},
};

#[derive(Debug)]
pub(crate) struct WakeFlag {
    shared: Arc<Shared>,
    waker: Waker,
}

#[derive(Debug)]
struct Shared {
    is_set: AtomicBool,
    /// The task of the loop.
    task: Mutex<Option<Waker>>,
}

/// Set, because a source registers its waker when it is polled for the first time.
impl Default for WakeFlag {
    fn default() -> WakeFlag {
        let shared = Arc::new(Shared { is_set: AtomicBool::new(true), task: Mutex::default() });
        WakeFlag { waker: Waker::from(Arc::clone(&shared)), shared }
    }
}

impl WakeFlag {
    /// Registers the task of the loop. Call it before anything is polled.
    pub(crate) fn register(&self, cx: &Context<'_>) {
        let mut task = self.shared.task.lock().unwrap_or_else(PoisonError::into_inner);
        if task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
            *task = Some(cx.waker().clone());
        }
    }

    /// The rare sources are polled in the next turn, because something was started that they report.
    pub(crate) fn set(&self) {
        self.shared.is_set.store(true, Ordering::Release);
    }

    /// Clears the flag. True if it was set.
    pub(crate) fn take(&self) -> bool {
        self.shared.is_set.load(Ordering::Relaxed) && self.shared.is_set.swap(false, Ordering::AcqRel)
    }

    /// The waker to poll the rare sources with.
    pub(crate) fn waker(&self) -> Waker {
        self.waker.clone()
    }
}

impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_set.store(true, Ordering::Release);
        if let Some(task) = &*self.task.lock().unwrap_or_else(PoisonError::into_inner) {
            task.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Count(std::sync::atomic::AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_wake_sets_the_flag_and_wakes_the_loop() {
        let (flag, task) = (WakeFlag::default(), Arc::new(Count::default()));
        assert!(flag.take(), "every source is polled once at the start");
        assert!(!flag.take());
        flag.register(&Context::from_waker(&Waker::from(Arc::clone(&task))));
        flag.waker().wake_by_ref();
        assert_eq!(task.0.load(Ordering::SeqCst), 1);
        assert!(flag.take());
        assert!(!flag.take());
        flag.set();
        assert!(flag.take());
        assert_eq!(task.0.load(Ordering::SeqCst), 1, "the loop sets the flag in a turn of its own");
    }
}
