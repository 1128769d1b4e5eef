//! What an HTTP exchange is answered with: one body as a whole, or events for as long as there are any.

use std::{
    cell::RefCell,
    collections::VecDeque,
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::Instant,
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use hyper::{
    StatusCode,
    body::{Body as HttpBody, Frame, SizeHint},
};

use super::{house::Shared, socket::Line};

/// Nothing but a sign of life; readers of events skip it.
pub const PING: &[u8] = b":\n\n";

/// How many times as much may wait for a reader that has not been found slow.
const BURST: usize = 4;

/// Where an exchange waits for its answer.
#[derive(Debug, Default)]
pub struct Reply(RefCell<Waiting>);

#[derive(Debug)]
enum Waiting {
    For(Option<Waker>),
    Told(Box<Answer>),
}

impl Default for Waiting {
    fn default() -> Waiting {
        Waiting::For(None)
    }
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    /// Minted with this answer.
    pub session: Option<u128>,
    pub kind: &'static str,
    /// Further headers, of pages.
    pub headers: Vec<(&'static str, String)>,
    pub content: Content,
    /// Of a refusal: what was wrong, for audit and metrics, where the status alone does not say it.
    pub refused: Option<&'static str>,
}

#[derive(Debug)]
pub enum Content {
    Nothing,
    Whole(Bytes),
    Events(Rc<Stream>, Place),
}

/// Which stream it is, for when its reader leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Of a client, by its number; 0 is the general stream of a session.
    Client(u64, u32),
    /// Events for the status page.
    Page(u64),
}

impl Reply {
    pub fn tell(&self, answer: Box<Answer>) {
        if let Waiting::For(Some(waker)) = self.0.replace(Waiting::Told(answer)) {
            waker.wake();
        }
    }

    /// Given once.
    pub fn poll(&self, cx: &Context<'_>) -> Poll<Box<Answer>> {
        let mut waiting = self.0.borrow_mut();
        match std::mem::take(&mut *waiting) {
            Waiting::Told(answer) => Poll::Ready(answer),
            Waiting::For(_) => {
                *waiting = Waiting::For(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}

/// Events on their way to one reader.
#[derive(Debug)]
pub struct Stream(RefCell<Queue>);

#[derive(Debug)]
struct Queue {
    frames: VecDeque<Bytes>,
    bytes: usize,
    state: State,
    waker: Option<Waker>,
    /// When something was last put in.
    fed: Instant,
    line: Rc<Line>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// What waits is still sent.
    Ended,
    /// The reader was too slow.
    Cut,
}

impl Stream {
    pub fn new(line: Rc<Line>, now: Instant) -> Rc<Stream> {
        let queue = Queue { frames: VecDeque::new(), bytes: 0, state: State::Open, waker: None, fed: now, line };
        Rc::new(Stream(RefCell::new(queue)))
    }

    /// Whoever takes nothing and lets more than `bytes_max` wait is cut off: nobody waits for it. A single frame may be
    /// larger, and one who takes what comes may be behind by a burst.
    pub fn put(&self, frame: Bytes, bytes_max: usize, now: Instant) {
        let mut queue = self.0.borrow_mut();
        if queue.state != State::Open {
            return;
        }
        let bytes = queue.bytes + frame.len();
        let allowed = if queue.line.is_stalled() { bytes_max } else { bytes_max.saturating_mul(BURST) };
        if !queue.frames.is_empty() && bytes > allowed {
            queue.state = State::Cut;
            queue.line.remove_waiting(queue.bytes);
            queue.frames.clear();
            queue.bytes = 0;
            queue.line.cut();
        } else {
            queue.line.add_waiting(frame.len());
            queue.bytes = bytes;
            queue.frames.push_back(frame);
            queue.fed = now;
        }
        queue.wake();
    }

    /// When it was last given something, unless all that still waits to be sent.
    pub fn silent_since(&self) -> Option<Instant> {
        let queue = self.0.borrow();
        (queue.frames.is_empty() && queue.state == State::Open).then_some(queue.fed)
    }

    pub fn end(&self) {
        let mut queue = self.0.borrow_mut();
        if queue.state == State::Open {
            queue.state = State::Ended;
        }
        queue.wake();
    }

    fn poll(&self, cx: &Context<'_>) -> Poll<Option<io::Result<Chunk>>> {
        let mut queue = self.0.borrow_mut();
        if let Some(frame) = queue.frames.pop_front() {
            queue.bytes -= frame.len();
            return Poll::Ready(Some(Ok(Chunk { bytes: frame, line: queue.line.clone() })));
        }
        match queue.state {
            State::Ended => Poll::Ready(None),
            State::Cut => Poll::Ready(Some(Err(io::ErrorKind::TimedOut.into()))),
            State::Open => {
                queue.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Queue {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.line.remove_waiting(self.bytes);
    }
}

/// Bytes of a response, counted among those that wait for their connection until the socket has taken them.
pub struct Chunk {
    bytes: Bytes,
    line: Rc<Line>,
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
        self.line.remove_waiting(count);
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        self.line.remove_waiting(self.bytes.len());
    }
}

/// The body of an answer, as hyper wants it. With its end the connection waits for the next request.
pub struct Body {
    content: Content,
    house: Shared,
    line: Rc<Line>,
}

impl Body {
    pub fn new(content: Content, house: Shared, line: Rc<Line>) -> Body {
        if let Content::Whole(bytes) = &content {
            line.add_waiting(bytes.len());
        }
        Body { content, house, line }
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
                Poll::Ready(Some(Ok(Frame::data(Chunk { bytes, line: self.line.clone() }))))
            }
            Content::Events(stream, _) => stream.poll(cx).map(|next| next.map(|bytes| bytes.map(Frame::data))),
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
            Content::Events(stream, place) => self.house.borrow_mut().reader_left(*place, stream, Instant::now()),
            // Nothing of it was sent.
            Content::Whole(bytes) => self.line.remove_waiting(bytes.len()),
            Content::Nothing => {}
        }
        self.line.rest(&self.house);
    }
}

/// One event with a message. A line feed in JSON text is white space, and would end the event's line.
pub fn event(id: Option<(u32, u64)>, message: &[u8]) -> Bytes {
    let message = message.trim_ascii();
    let mut frame = BytesMut::with_capacity(message.len() + 48);
    if let Some((stream, number)) = id {
        frame.put_slice(format!("id: {stream}-{number}\n").as_bytes());
    }
    frame.put_slice(b"data: ");
    let start = frame.len();
    frame.put_slice(message);
    if memchr::memchr2(b'\n', b'\r', message).is_some() {
        for byte in &mut frame[start..] {
            if matches!(byte, b'\n' | b'\r') {
                *byte = b' ';
            }
        }
    }
    frame.put_slice(b"\n\n");
    frame.freeze()
}

/// An id by which a stream can be taken up again, and nothing else.
pub fn prime(stream: u32, number: u64) -> Bytes {
    format!("id: {stream}-{number}\ndata:\n\n").into()
}

/// An event of the status page.
pub fn named(name: &str, data: &str) -> Bytes {
    let data = data.trim_end().replace(['\n', '\r'], " ");
    format!("event: {name}\ndata: {data}\n\n").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_of_data_whatever_the_json_looks_like() {
        let table = [
            ("{}", "data: {}\n\n"),
            ("{\"a\":1}\n", "data: {\"a\":1}\n\n"),
            ("{\r\n  \"a\": \"x\\ny\"\n}", "data: {    \"a\": \"x\\ny\" }\n\n"),
        ];
        for (message, frame) in table {
            assert_eq!(event(None, message.as_bytes()), frame);
        }
        assert_eq!(event(Some((3, 9)), b"1"), "id: 3-9\ndata: 1\n\n");
        assert_eq!(named("state", "{\n}\n"), "event: state\ndata: { }\n\n");
    }
}
