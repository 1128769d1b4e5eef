//! A stream between two replicas, as a task uses it: it waits for messages, and for room. Dropping it ends the stream.

use std::{
    collections::VecDeque,
    future::poll_fn,
    task::{Poll, Waker},
};

use bytes::Bytes;
use outlast_core::cluster::{
    Instance,
    streams::{self, End, Stream},
};
use serde_json::value::RawValue;

use super::{Hello, SharedReplica};

/// What is kept of a stream that a task uses.
#[derive(Debug, Default)]
pub(super) struct PipeState {
    pub(super) inbox: VecDeque<Bytes>,
    pub(super) end: Option<PipeEnd>,
    pub(super) reader: Option<Waker>,
    pub(super) writer: Option<Waker>,
}

/// How a stream ended.
#[derive(Debug, Clone)]
pub(crate) struct PipeEnd {
    pub how: End,
    /// False: the other replica knows nothing of the stream.
    pub is_opened: bool,
    /// Messages that were not sent.
    pub unsent: Vec<Bytes>,
}

pub(crate) struct Pipe {
    replica: SharedReplica,
    stream: Stream,
}

impl Pipe {
    /// Opens a stream for one HTTP request, which is described by JSON.
    pub(crate) fn open(replica: &SharedReplica, to: Instance, request: Box<RawValue>) -> Pipe {
        let hello = serde_json::to_vec(&Hello::Request(request)).unwrap_or_default();
        let mut borrowed = replica.borrow_mut();
        let stream = borrowed.streams.next_stream();
        borrowed.pipes.insert(stream, PipeState::default());
        borrowed.stream_event(streams::Event::Opened { stream, to, hello: hello.into() });
        borrowed.wake_task();
        drop(borrowed);
        Pipe { replica: replica.clone(), stream }
    }

    /// A stream that another replica has opened.
    pub(crate) fn accept(replica: &SharedReplica, stream: Stream) -> Pipe {
        Pipe { replica: replica.clone(), stream }
    }

    pub(crate) fn send(&self, message: Bytes) {
        let mut replica = self.replica.borrow_mut();
        replica.send(self.stream, message);
        replica.wake_task();
    }

    /// Waits until the other replica has read enough.
    pub(crate) async fn room(&self) {
        poll_fn(|cx| {
            let mut replica = self.replica.borrow_mut();
            let is_full = replica.streams.is_full(self.stream);
            match replica.pipes.get_mut(&self.stream) {
                Some(pipe) if is_full && pipe.end.is_none() => {
                    pipe.writer = Some(cx.waker().clone());
                    Poll::Pending
                }
                _ => Poll::Ready(()),
            }
        })
        .await;
    }

    /// The next message, or how the stream ended.
    pub(crate) async fn receive(&self) -> Result<Bytes, PipeEnd> {
        poll_fn(|cx| {
            let mut replica = self.replica.borrow_mut();
            let Some(pipe) = replica.pipes.get_mut(&self.stream) else { return Poll::Pending };
            if let Some(message) = pipe.inbox.pop_front() {
                replica.consumed(self.stream, message.len());
                replica.wake_task();
                return Poll::Ready(Ok(message));
            }
            if let Some(end) = &pipe.end {
                return Poll::Ready(Err(end.clone()));
            }
            pipe.reader = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Everything was sent; it reaches the other replica before the end does.
    pub(crate) fn finish(self) {
        let mut replica = self.replica.borrow_mut();
        if replica.pipes.remove(&self.stream).is_some_and(|pipe| pipe.end.is_none()) {
            replica.close(self.stream);
            replica.wake_task();
        }
    }

    pub(crate) fn abort(self, why: &str) {
        self.replica.borrow_mut().end_pipe(self.stream, why);
    }
}

impl super::Replica {
    fn end_pipe(&mut self, stream: Stream, why: &str) {
        if self.pipes.remove(&stream).is_some_and(|pipe| pipe.end.is_none()) {
            self.abort(stream, why);
            self.wake_task();
        }
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.replica.borrow_mut().end_pipe(self.stream, "it is not needed any more");
    }
}
