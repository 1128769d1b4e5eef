//! The set of pipes and connections whose waker fired; the loop polls only these. It does not poll and owns no stream.

use std::{
    future::Future,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

/// The ready keys of one loop, with the waker of its task.
#[derive(Debug, Default)]
pub(super) struct ReadySet(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    keys: Mutex<Vec<u64>>,
    /// The waker of the forwarding task, if that task runs.
    forwarder: WakerSlot,
    /// The waker of the loop's own task.
    main_loop: WakerSlot,
}

/// The last waker of one task.
#[derive(Debug, Default)]
struct WakerSlot(Mutex<Option<Waker>>);

impl WakerSlot {
    fn register(&self, cx: &Context<'_>) {
        let mut waker = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
    }

    /// False if no waker is registered.
    fn wake(&self) -> bool {
        let waker = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waker.as_ref().map(Waker::wake_by_ref).is_some()
    }
}

/// Adds its key to the ready set and wakes the loop.
#[derive(Debug)]
struct Source {
    key: u64,
    /// The key is in the set already, so that it is not added twice.
    is_ready: AtomicBool,
    set: Arc<Shared>,
}

/// The waker of one pipe or connection.
#[derive(Debug, Clone)]
pub(super) struct ReadyWaker {
    source: Arc<Source>,
    waker: Waker,
}

impl ReadySet {
    /// Registers the task of the loop. Call it before anything is polled.
    pub(super) fn register(&self, cx: &Context<'_>) {
        self.0.main_loop.register(cx);
    }

    /// A task that forwards wakes to the loop; it does not end. While it runs, the loop is scheduled after all tasks that were
    /// woken together, and takes their keys in one turn.
    pub(super) fn forward_wakes(&self) -> impl Future<Output = ()> + use<> {
        let shared = Arc::clone(&self.0);
        std::future::poll_fn(move |cx| {
            shared.forwarder.register(cx);
            shared.main_loop.wake();
            Poll::Pending
        })
    }

    pub(super) fn waker(&self, key: u64) -> ReadyWaker {
        let source = Arc::new(Source { key, is_ready: AtomicBool::new(false), set: Arc::clone(&self.0) });
        ReadyWaker { waker: Waker::from(Arc::clone(&source)), source }
    }

    /// Moves the ready keys into `ready`. The caller must poll each of them: a key is added again only after its poll.
    pub(super) fn take(&self, ready: &mut Vec<u64>) {
        ready.append(&mut self.0.keys.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Returns keys that were taken and not polled; they are the first to be taken again.
    pub(super) fn put_back(&self, keys: impl Iterator<Item = u64>) {
        self.0.keys.lock().unwrap_or_else(PoisonError::into_inner).splice(..0, keys);
    }
}

impl ReadyWaker {
    /// The waker to poll with. From here on its key can be added again.
    pub(super) fn rearm(&self) -> &Waker {
        self.source.is_ready.store(false, Ordering::Release);
        &self.waker
    }

    /// Adds the key without an event of the operating system, because there is more to do.
    pub(super) fn wake(&self) {
        self.waker.wake_by_ref();
    }
}

impl Wake for Source {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.is_ready.swap(true, Ordering::AcqRel) {
            return;
        }
        self.set.keys.lock().unwrap_or_else(PoisonError::into_inner).push(self.key);
        if !self.set.forwarder.wake() {
            self.set.main_loop.wake();
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
    fn a_woken_key_is_taken_once() {
        let set = ReadySet::default();
        let woken = Arc::new(Count::default());
        set.register(&Context::from_waker(&Waker::from(Arc::clone(&woken))));
        let (one, two) = (set.waker(1), set.waker(2));
        let waker = one.rearm().clone();
        waker.wake_by_ref();
        waker.wake_by_ref();
        let mut ready = Vec::new();
        set.take(&mut ready);
        assert_eq!((ready.as_slice(), woken.0.load(Ordering::SeqCst)), (&[1][..], 1));

        // It was not polled since, so the wake adds nothing.
        waker.wake_by_ref();
        ready.clear();
        set.take(&mut ready);
        assert!(ready.is_empty());

        one.rearm();
        waker.wake_by_ref();
        two.wake();
        set.take(&mut ready);
        assert_eq!(ready, [1, 2]);
    }

    #[test]
    fn the_forwarding_task_wakes_the_loop_when_it_is_polled() {
        let set = ReadySet::default();
        let (main_loop, forwarder) = (Arc::new(Count::default()), Arc::new(Count::default()));
        let (loop_waker, forwarder_waker) = (Waker::from(Arc::clone(&main_loop)), Waker::from(Arc::clone(&forwarder)));
        set.register(&Context::from_waker(&loop_waker));
        let waker = set.waker(1);
        // A wake before the forwarding task runs is not lost.
        waker.wake();
        assert_eq!(main_loop.0.load(Ordering::SeqCst), 1);
        let mut task = std::pin::pin!(set.forward_wakes());
        let mut turn = || assert!(task.as_mut().poll(&mut Context::from_waker(&forwarder_waker)).is_pending());
        turn();
        assert_eq!(main_loop.0.load(Ordering::SeqCst), 2);
        let mut ready = Vec::new();
        set.take(&mut ready);
        assert_eq!(ready, [1]);
        waker.rearm().wake_by_ref();
        assert_eq!((forwarder.0.load(Ordering::SeqCst), main_loop.0.load(Ordering::SeqCst)), (1, 2));
        turn();
        assert_eq!(main_loop.0.load(Ordering::SeqCst), 3);
    }
}
