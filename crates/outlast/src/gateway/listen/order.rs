//! The order of a session's messages while a long one is parsed beside the loop. A short message of another session does not
//! wait.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc, sync::Arc};

use outlast_core::front::SessionId;
use tokio::sync::{Mutex, OwnedMutexGuard};

/// The sessions of which a long message is parsed. The lock is a queue: it is given to those that wait in their order.
#[derive(Clone, Default)]
pub(super) struct SessionOrder(Rc<RefCell<BTreeMap<SessionId, Arc<Mutex<()>>>>>);

/// Until this is dropped, later messages of the session wait.
pub(super) struct Turn {
    order: SessionOrder,
    session: SessionId,
    lock: Option<Arc<Mutex<()>>>,
    guard: Option<OwnedMutexGuard<()>>,
}

impl SessionOrder {
    /// Waits for the earlier messages of this session. `None` if a short message need not wait.
    pub(super) async fn turn(&self, session: SessionId, is_long: bool) -> Option<Turn> {
        let lock = match is_long {
            true => self.0.borrow_mut().entry(session).or_default().clone(),
            false => self.0.borrow().get(&session)?.clone(),
        };
        let mut turn = Turn { order: self.clone(), session, lock: Some(lock.clone()), guard: None };
        turn.guard = Some(lock.lock_owned().await);
        Some(turn)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        drop((self.guard.take(), self.lock.take()));
        let mut sessions = self.order.0.borrow_mut();
        // No other message of the session is parsed or waits.
        if sessions.get(&self.session).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            sessions.remove(&self.session);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::Future,
        pin::pin,
        task::{Context, Poll, Waker},
    };

    use super::*;

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn messages_wait_for_the_earlier_ones_of_their_session() {
        let order = SessionOrder::default();
        assert!(matches!(poll(pin!(order.turn(1, false))), Poll::Ready(None)));
        let Poll::Ready(Some(first)) = poll(pin!(order.turn(1, true))) else { panic!("nothing to wait for") };
        assert!(matches!(poll(pin!(order.turn(2, false))), Poll::Ready(None)), "another session");
        let (mut second, mut third) = (pin!(order.turn(1, false)), pin!(order.turn(1, true)));
        assert!(poll(second.as_mut()).is_pending() && poll(third.as_mut()).is_pending());
        {
            // Its client leaves.
            let mut left = pin!(order.turn(1, false));
            assert!(poll(left.as_mut()).is_pending());
        }
        drop(first);
        assert!(poll(third.as_mut()).is_pending(), "the second is first");
        let Poll::Ready(Some(second)) = poll(second.as_mut()) else { panic!("it is its turn") };
        drop(second);
        assert!(matches!(poll(third.as_mut()), Poll::Ready(Some(_))));
        assert!(order.0.borrow().is_empty());
    }
}
