//! Who woke us: of many pipes and connections only those are looked at that have something to say.

use std::{
    future::Future,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

/// All bells ring here. One loop listens.
#[derive(Debug, Default)]
pub struct Tower(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    rung: Mutex<Vec<u64>>,
    porter: Door,
    /// The loop's own.
    listener: Door,
}

/// Where somebody is to be woken.
#[derive(Debug, Default)]
struct Door(Mutex<Option<Waker>>);

impl Door {
    fn open(&self, cx: &Context<'_>) {
        let mut waker = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
    }

    /// False: nobody is there.
    fn knock(&self) -> bool {
        let waker = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waker.as_ref().map(Waker::wake_by_ref).is_some()
    }
}

/// Wakes the loop, and says for whom.
#[derive(Debug)]
struct Bell {
    key: u64,
    /// It waits to be heard already, so that no key is noted twice.
    is_rung: AtomicBool,
    tower: Arc<Shared>,
}

/// A bell to hand out.
#[derive(Debug, Clone)]
pub struct Rope {
    bell: Arc<Bell>,
    waker: Waker,
}

impl Tower {
    /// To be called before anything is polled: from here on the bells wake this task.
    pub fn listen(&self, cx: &Context<'_>) {
        self.0.listener.open(cx);
    }

    /// A task that passes the bells on, if there is one: the loop's turn then comes after that of everybody who was woken
    /// together with it, and it hears them all at once. It does not end.
    pub fn porter(&self) -> impl Future<Output = ()> + use<> {
        let shared = Arc::clone(&self.0);
        std::future::poll_fn(move |cx| {
            shared.porter.open(cx);
            shared.listener.knock();
            Poll::Pending
        })
    }

    pub fn rope(&self, key: u64) -> Rope {
        let bell = Arc::new(Bell { key, is_rung: AtomicBool::new(false), tower: Arc::clone(&self.0) });
        Rope { waker: Waker::from(Arc::clone(&bell)), bell }
    }

    /// Moves the keys of all that rang since into `rung`. Each must be polled, or it is not heard again.
    pub fn take(&self, rung: &mut Vec<u64>) {
        rung.append(&mut self.0.rung.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Rope {
    /// What to poll with. From here on it may ring again.
    pub fn waker(&self) -> &Waker {
        self.bell.is_rung.store(false, Ordering::Release);
        &self.waker
    }

    /// There is something to do that nobody outside knows of.
    pub fn pull(&self) {
        self.waker.wake_by_ref();
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.is_rung.swap(true, Ordering::AcqRel) {
            return;
        }
        self.tower.rung.lock().unwrap_or_else(PoisonError::into_inner).push(self.key);
        if !self.tower.porter.knock() {
            self.tower.listener.knock();
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
    fn only_who_rang_is_heard_and_once() {
        let tower = Tower::default();
        let woken = Arc::new(Count::default());
        tower.listen(&Context::from_waker(&Waker::from(Arc::clone(&woken))));
        let (one, two) = (tower.rope(1), tower.rope(2));
        let waker = one.waker().clone();
        waker.wake_by_ref();
        waker.wake_by_ref();
        let mut rung = Vec::new();
        tower.take(&mut rung);
        assert_eq!((rung.as_slice(), woken.0.load(Ordering::SeqCst)), (&[1][..], 1));

        // Not polled since: there is nothing new to hear.
        waker.wake_by_ref();
        rung.clear();
        tower.take(&mut rung);
        assert!(rung.is_empty());

        one.waker();
        waker.wake_by_ref();
        two.pull();
        tower.take(&mut rung);
        assert_eq!(rung, [1, 2]);
    }

    #[test]
    fn a_porter_passes_the_bells_on_when_it_is_his_turn() {
        let tower = Tower::default();
        let (listener, porter) = (Arc::new(Count::default()), Arc::new(Count::default()));
        let (listens, carries) = (Waker::from(Arc::clone(&listener)), Waker::from(Arc::clone(&porter)));
        tower.listen(&Context::from_waker(&listens));
        let rope = tower.rope(1);
        // What rang before there was a porter is not lost.
        rope.pull();
        assert_eq!(listener.0.load(Ordering::SeqCst), 1);
        let mut task = std::pin::pin!(tower.porter());
        let mut turn = || assert!(task.as_mut().poll(&mut Context::from_waker(&carries)).is_pending());
        turn();
        assert_eq!(listener.0.load(Ordering::SeqCst), 2);
        let mut rung = Vec::new();
        tower.take(&mut rung);
        assert_eq!(rung, [1]);
        rope.waker().wake_by_ref();
        assert_eq!((porter.0.load(Ordering::SeqCst), listener.0.load(Ordering::SeqCst)), (1, 2));
        turn();
        assert_eq!(listener.0.load(Ordering::SeqCst), 3);
    }
}
