//! The one timer of a loop, set to the soonest of its deadlines. What is due is decided by the loop.

use std::{future::Future, pin::Pin, task::Context, time::Instant};

use tokio::time::{Sleep, sleep_until};

#[derive(Debug, Default)]
pub(crate) struct Timer(Option<Pin<Box<Sleep>>>);

impl Timer {
    /// True if the deadline was reached; otherwise the task is woken when it is.
    pub(crate) fn poll(&mut self, deadline: Option<Instant>, now: Instant, cx: &mut Context<'_>) -> bool {
        let Some(at) = deadline else {
            self.0 = None;
            return false;
        };
        if at <= now {
            return true;
        }
        let timer = self.0.get_or_insert_with(|| Box::pin(sleep_until(at.into())));
        if timer.deadline() != at.into() {
            timer.as_mut().reset(at.into());
        }
        timer.as_mut().poll(cx).is_ready()
    }
}
