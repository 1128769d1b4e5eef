//! The response to an HTTP request: one body, or a stream of events.

use std::{
    cell::RefCell,
    collections::VecDeque,
    fmt, io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::Instant,
};

use bytes::{Buf, Bytes};
use hyper::{
    StatusCode,
    body::{Body as HttpBody, Frame, SizeHint},
};

use outlast_core::front::{SessionId, frames};

use super::{driver::Shared, socket::Connection};

/// A reader that is not stalled may have this many times more unsent bytes.
const BURST: usize = 4;

#[derive(Debug)]
pub(super) struct Answer {
    pub status: StatusCode,
    /// The id of a new session, sent with this answer.
    pub session: Option<SessionId>,
    pub kind: &'static str,
    /// Additional headers, for pages.
    pub headers: Vec<(&'static str, String)>,
    pub content: Content,
    /// For a refusal: its kind, for audit and metrics, if the status alone does not tell it.
    pub refused: Option<&'static str>,
}

#[derive(Debug)]
pub(super) enum Content {
    Nothing,
    Whole(Bytes),
    Events(Reply, Owner),
}

/// The owner of a response, which is told when its connection is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Client(u64),
    /// Events for the status page.
    Page(u64),
    /// Events that another replica sends.
    Forward(u64),
}

/// The response to one HTTP request: the connection waits for its head, and for the events that follow if it is a
/// stream. Clones are the same response.
#[derive(Clone)]
pub(super) struct Reply(Rc<Inner>);

struct Inner {
    connection: Rc<Connection>,
    head: RefCell<Head>,
    events: RefCell<Events>,
}

enum Head {
    Awaited(Option<Waker>),
    Given(Box<Answer>),
    Taken,
}

#[derive(Default)]
struct Events {
    frames: VecDeque<Bytes>,
    bytes: usize,
    state: State,
    waker: Option<Waker>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Open,
    /// Pending frames are still sent.
    Ended,
    /// The reader was too slow.
    Cut,
}

impl PartialEq for Reply {
    fn eq(&self, other: &Reply) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reply")
    }
}

impl Reply {
    pub(super) fn new(connection: Rc<Connection>) -> Reply {
        let (head, events) = (RefCell::new(Head::Awaited(None)), RefCell::default());
        Reply(Rc::new(Inner { connection, head, events }))
    }

    /// Sets the head of the response, and all of it if it is not a stream. Only the first call counts.
    pub(super) fn answer(&self, answer: Box<Answer>) {
        let mut head = self.0.head.borrow_mut();
        if let Head::Awaited(waker) = &mut *head {
            let waker = waker.take();
            *head = Head::Given(answer);
            waker.into_iter().for_each(Waker::wake);
        }
    }

    /// The answer, if it was set and not taken yet.
    pub(super) fn take(&self) -> Option<Box<Answer>> {
        match self.0.head.replace(Head::Taken) {
            Head::Given(answer) => Some(answer),
            other => {
                self.0.head.replace(other);
                None
            }
        }
    }

    pub(super) fn poll(&self, cx: &Context<'_>) -> Poll<Box<Answer>> {
        if let Some(answer) = self.take() {
            return Poll::Ready(answer);
        }
        if let Head::Awaited(waker) = &mut *self.0.head.borrow_mut() {
            *waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// A reader that is stalled with more than `bytes_max` unsent bytes is disconnected. A single frame may be
    /// larger, and a reader that keeps reading may be behind by a burst.
    pub(super) fn send(&self, frame: Bytes, bytes_max: usize) {
        let Inner { connection, events, .. } = &*self.0;
        let mut events = events.borrow_mut();
        if events.state != State::Open {
            return;
        }
        let bytes = events.bytes + frame.len();
        let allowed = if connection.is_stalled() { bytes_max } else { bytes_max.saturating_mul(BURST) };
        if !events.frames.is_empty() && bytes > allowed {
            events.state = State::Cut;
            connection.remove_waiting(events.bytes);
            events.frames.clear();
            events.bytes = 0;
            connection.cut();
        } else {
            connection.add_waiting(frame.len());
            events.bytes = bytes;
            events.frames.push_back(frame);
        }
        events.wake();
    }

    /// A ping makes the kernel detect a lost reader. Pending frames have the same effect.
    pub(super) fn ping(&self) {
        if self.0.events.borrow().frames.is_empty() {
            self.send(Bytes::from_static(frames::PING), usize::MAX);
        }
    }

    pub(super) fn end(&self) {
        let mut events = self.0.events.borrow_mut();
        if events.state == State::Open {
            events.state = State::Ended;
        }
        events.wake();
    }

    fn poll_event(&self, cx: &Context<'_>) -> Poll<Option<io::Result<Chunk>>> {
        let mut events = self.0.events.borrow_mut();
        if let Some(frame) = events.frames.pop_front() {
            events.bytes -= frame.len();
            return Poll::Ready(Some(Ok(Chunk { bytes: frame, connection: self.0.connection.clone() })));
        }
        match events.state {
            State::Ended => Poll::Ready(None),
            State::Cut => Poll::Ready(Some(Err(io::ErrorKind::TimedOut.into()))),
            State::Open => {
                events.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Events {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.connection.remove_waiting(self.events.get_mut().bytes);
    }
}

/// Bytes of a response. They count as unsent until the socket has taken them.
pub(super) struct Chunk {
    bytes: Bytes,
    connection: Rc<Connection>,
}

impl Buf for Chunk {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
        self.connection.remove_waiting(count);
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.connection.remove_waiting(self.bytes.len());
    }
}

/// The body of an answer, as hyper needs it. At its end the connection waits for the next request.
pub(super) struct Body {
    content: Content,
    driver: Shared,
    connection: Rc<Connection>,
}

impl Body {
    pub(super) fn new(content: Content, driver: Shared, connection: Rc<Connection>) -> Body {
        match &content {
            Content::Whole(bytes) => connection.add_waiting(bytes.len()),
            Content::Events(..) => connection.begin_stream(),
            Content::Nothing => {}
        }
        Body { content, driver, connection }
    }
}

impl Body {
    /// It has no bytes, and none will come.
    pub(super) fn is_empty(&self) -> bool {
        matches!(self.content, Content::Nothing)
    }
}

impl HttpBody for Body {
    type Data = Chunk;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Chunk>>>> {
        match &mut self.content {
            Content::Nothing => Poll::Ready(None),
            Content::Whole(bytes) => {
                let bytes = std::mem::take(bytes);
                self.content = Content::Nothing;
                Poll::Ready(Some(Ok(Frame::data(Chunk { bytes, connection: self.connection.clone() }))))
            }
            Content::Events(reply, _) => reply.poll_event(cx).map(|next| next.map(|bytes| bytes.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Nothing => true,
            Content::Whole(bytes) => bytes.is_empty(),
            Content::Events(..) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Nothing => SizeHint::with_exact(0),
            Content::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Content::Events(..) => SizeHint::default(),
        }
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        match &self.content {
            Content::Events(reply, owner) => self.driver.borrow_mut().reader_left(*owner, reply, Instant::now()),
            // No part of it was sent.
            Content::Whole(bytes) => self.connection.remove_waiting(bytes.len()),
            Content::Nothing => {}
        }
        self.connection.rest(&self.driver);
    }
}
