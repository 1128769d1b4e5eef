//! One session of the handshake era: its open requests, its streams, and the events that a reader may have missed.

use std::{collections::VecDeque, rc::Rc, time::Instant};

use bytes::{BufMut, Bytes, BytesMut};
use hyper::StatusCode;
use outlast_core::{
    gateway::{Said, Who},
    message::Id,
};
use rustc_hash::FxHashMap;

use super::{
    Limits,
    socket::{Line, Pass},
    stream::{self, Answer, Place, Reply, Stream},
    words,
};

/// The stream that belongs to no request.
pub const GENERAL: u32 = 0;
/// General streams that one session may have open; with one more the oldest ends. Each message goes to the newest.
const GENERAL_MAX: usize = 4;

#[derive(Debug)]
pub struct Session {
    pub client: u64,
    /// Nobody knows it before `initialize` was answered.
    pub id: Option<u128>,
    pub who: Rc<Who>,
    /// The credentials of its newest request with an answer.
    pub pass: Option<Rc<Pass>>,
    /// Where its newest request came from.
    pub peer: Option<Rc<str>>,
    /// The `initialize` that has no answer yet.
    pub opening: Option<Id>,
    /// As `initialize` was answered; later requests may not say so.
    pub version: String,
    posts: FxHashMap<u32, Post>,
    requests: FxHashMap<Id, u32>,
    next_post: u32,
    general: VecDeque<Rc<Stream>>,
    /// The last event of the general stream that a reader was given.
    general_given: u64,
    events: VecDeque<Kept>,
    pub events_bytes: usize,
    next_event: u64,
    /// When it was last heard of.
    pub seen: Instant,
}

/// A POST with requests, until each has its answer.
#[derive(Debug)]
struct Post {
    /// Requests of it without an answer.
    open: usize,
    is_batch: bool,
    /// Answers that wait for the others of their batch.
    answers: Vec<Bytes>,
    way: Way,
    is_opening: bool,
    began: Instant,
}

#[derive(Debug)]
enum Way {
    /// Nothing was said yet.
    Quiet(Rc<Reply>, Rc<Line>),
    /// Nobody reads it at the moment, if there is no stream.
    Events(Option<Rc<Stream>>),
    /// Its client left before there was an event to come back to.
    Lost,
}

#[derive(Debug)]
struct Kept {
    stream: u32,
    number: u64,
    frame: Bytes,
}

/// Why a stream cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoStream {
    NotAnId,
    Forgotten,
}

impl Session {
    pub fn new(client: u64, who: Rc<Who>, now: Instant) -> Session {
        Session {
            client,
            id: None,
            who,
            pass: None,
            peer: None,
            opening: None,
            version: String::new(),
            posts: FxHashMap::default(),
            requests: FxHashMap::default(),
            next_post: GENERAL + 1,
            general: VecDeque::new(),
            general_given: 0,
            events: VecDeque::new(),
            events_bytes: 0,
            next_event: 1,
            seen: now,
        }
    }

    pub fn has(&self, id: &Id) -> bool {
        self.requests.contains_key(id)
    }

    /// A POST with these requests waits for its answer at `reply`.
    pub fn post(
        &mut self,
        ids: impl AsRef<[Id]> + IntoIterator<Item = Id>,
        is_batch: bool,
        reply: Rc<Reply>,
        line: Rc<Line>,
        now: Instant,
    ) -> u32 {
        let number = self.next_post;
        self.next_post += 1;
        self.peer = Some(line.peer().clone());
        let post = Post {
            open: ids.as_ref().len(),
            is_batch,
            answers: Vec::new(),
            way: Way::Quiet(reply, line),
            is_opening: self.opening.as_ref() == ids.as_ref().first(),
            began: now,
        };
        self.posts.insert(number, post);
        self.requests.extend(ids.into_iter().map(|id| (id, number)));
        self.seen = now;
        number
    }

    /// What the machine has to say to this client. What nobody can hear any more is dropped.
    pub fn tell(&mut self, message: Bytes, said: Said, about: Option<&Id>, limits: &Limits, now: Instant) {
        let number = about.and_then(|id| self.requests.get(id)).copied();
        let is_answer = said != Said::Other;
        let Some((number, post)) = number.and_then(|number| Some((number, self.posts.get_mut(&number)?))) else {
            if !is_answer {
                self.put(GENERAL, &message, limits, now);
            }
            return;
        };
        if let (true, Some(id)) = (is_answer, about) {
            self.requests.remove(id);
            post.open -= 1;
        }
        let is_over = post.open == 0;
        match &mut post.way {
            Way::Quiet(reply, _) if is_over => {
                let session = self.id.filter(|_| post.is_opening);
                let retry_after = if post.is_batch { None } else { words::retry_after(&message, said) };
                let body = if post.is_batch { join(&post.answers, &message) } else { message };
                reply.tell(Answer::json(StatusCode::OK, session, body).with_all(retry_after));
            }
            Way::Quiet(..) if is_answer => post.answers.push(message),
            Way::Quiet(..) => {
                self.open_events(number, limits, now);
                self.put(number, &message, limits, now);
            }
            Way::Events(_) => self.put(number, &message, limits, now),
            Way::Lost if !is_answer => self.put(GENERAL, &message, limits, now),
            Way::Lost => {}
        }
        if is_over && let Some(Post { way: Way::Events(Some(stream)), .. }) = self.posts.remove(&number) {
            stream.end();
        }
    }

    /// The client cancelled this request: nothing more comes for it. A POST that has no other ends without an answer.
    pub fn cancelled(&mut self, id: &Id, now: Instant) {
        let Some(number) = self.requests.remove(id) else { return };
        let Some(post) = self.posts.get_mut(&number) else { return };
        post.open -= 1;
        if post.open > 0 {
            return;
        }
        let Some(mut post) = self.posts.remove(&number) else { return };
        match (post.way, post.answers.pop()) {
            (Way::Quiet(reply, _), Some(last)) => {
                reply.tell(Answer::json(StatusCode::OK, None, join(&post.answers, &last)));
            }
            (Way::Quiet(reply, line), None) => {
                // Without an event there is no id, so nobody tries to take it up again.
                let stream = Stream::new(line, now);
                stream.end();
                reply.tell(Answer::events(None, stream, Place::Client(self.client, number)));
            }
            (Way::Events(stream), _) => {
                if !post.is_batch {
                    // Whoever came back would wait for an answer, again and again.
                    self.forget_stream(number);
                }
                if let Some(stream) = stream {
                    stream.end();
                }
            }
            (Way::Lost, _) => {}
        }
    }

    fn forget_stream(&mut self, number: u32) {
        self.events.retain(|event| event.stream != number);
        self.events_bytes = self.events.iter().map(|event| event.frame.len()).sum();
    }

    /// Its answer becomes a stream of events; answers of its batch that waited are the first of them.
    fn open_events(&mut self, number: u32, limits: &Limits, now: Instant) {
        let Some(post) = self.posts.get_mut(&number) else { return };
        let Way::Quiet(reply, line) = &post.way else { return };
        let stream = Stream::new(line.clone(), now);
        let session = self.id.filter(|_| post.is_opening);
        reply.tell(Answer::events(session, stream.clone(), Place::Client(self.client, number)));
        post.way = Way::Events(Some(stream));
        let answers = std::mem::take(&mut post.answers);
        // Earlier revisions have no events without data, and their clients choke on them.
        if words::has_priming(&self.version) {
            let frame = stream::prime(number, self.next_event);
            self.keep(number, frame, limits, now);
        }
        for answer in answers {
            self.put(number, &answer, limits, now);
        }
    }

    fn put(&mut self, number: u32, message: &[u8], limits: &Limits, now: Instant) {
        let frame = stream::event(Some((number, self.next_event)), message);
        self.keep(number, frame, limits, now);
    }

    /// An event is sent to whoever reads that stream, and kept for those who come back.
    fn keep(&mut self, number: u32, frame: Bytes, limits: &Limits, now: Instant) {
        self.events_bytes += frame.len();
        self.events.push_back(Kept { stream: number, number: self.next_event, frame: frame.clone() });
        while self.events.len() > limits.events_max || self.events_bytes > limits.events_bytes_max {
            self.forget_event();
        }
        let reader = match number {
            GENERAL => self.general.back(),
            _ => self.posts.get(&number).and_then(|post| match &post.way {
                Way::Events(stream) => stream.as_ref(),
                _ => None,
            }),
        };
        if let Some(stream) = reader {
            stream.put(frame, limits.stream_bytes_max, now);
            if number == GENERAL {
                self.general_given = self.next_event;
            }
        }
        self.next_event += 1;
    }

    /// The oldest, for want of room.
    pub fn forget_event(&mut self) {
        if let Some(oldest) = self.events.pop_front() {
            self.events_bytes -= oldest.frame.len();
        }
    }

    /// A GET: the general stream, or one that broke off after the named event.
    pub fn listen(
        &mut self,
        last: Option<&str>,
        line: Rc<Line>,
        now: Instant,
    ) -> Result<(Rc<Stream>, Place), NoStream> {
        self.seen = now;
        let (number, after) = match last {
            Some(id) => read_event_id(id).ok_or(NoStream::NotAnId)?,
            None => (GENERAL, self.general_given),
        };
        let is_open = number == GENERAL || self.posts.contains_key(&number);
        if !is_open && !self.events.iter().any(|event| event.stream == number) {
            return Err(NoStream::Forgotten);
        }
        let stream = Stream::new(line, now);
        for event in self.events.iter().filter(|event| event.stream == number && event.number > after) {
            // What was missed comes whole: it is bounded already.
            stream.put(event.frame.clone(), usize::MAX, now);
        }
        if number == GENERAL {
            self.general_given = self.next_event - 1;
            self.general.push_back(stream.clone());
            if self.general.len() > GENERAL_MAX
                && let Some(oldest) = self.general.pop_front()
            {
                oldest.end();
            }
        } else if let Some(post) = self.posts.get_mut(&number) {
            if let Way::Events(Some(older)) = std::mem::replace(&mut post.way, Way::Events(Some(stream.clone()))) {
                older.end();
            }
        } else {
            stream.end();
        }
        Ok((stream, Place::Client(self.client, number)))
    }

    /// Whoever read this stream is gone. In this era that cancels nothing.
    pub fn reader_left(&mut self, number: u32, stream: &Rc<Stream>, now: Instant) {
        self.seen = now;
        self.general.retain(|open| !Rc::ptr_eq(open, stream));
        if let Some(Post { way: Way::Events(reader), .. }) = self.posts.get_mut(&number)
            && reader.as_ref().is_some_and(|open| Rc::ptr_eq(open, stream))
        {
            *reader = None;
        }
    }

    /// The client of a POST left before it was said anything.
    pub fn poster_left(&mut self, number: u32, now: Instant) {
        self.seen = now;
        if let Some(post) = self.posts.get_mut(&number) {
            post.way = Way::Lost;
        }
    }

    /// Somebody is connected and waits for something.
    pub fn is_attended(&self) -> bool {
        let waits = |post: &Post| matches!(post.way, Way::Quiet(..) | Way::Events(Some(_)));
        !self.general.is_empty() || self.posts.values().any(waits)
    }

    /// Some request has waited so long that its answer becomes a stream.
    pub fn is_slow(&self, limits: &Limits, now: Instant) -> bool {
        self.posts.values().any(|post| matches!(post.way, Way::Quiet(..)) && post.began + limits.quiet <= now)
    }

    /// What time has brought: pings, and streams for requests that take long. Says when to look again.
    pub fn sweep(&mut self, limits: &Limits, now: Instant) -> Option<Instant> {
        let mut next = None;
        let slow = self.posts.iter().filter(|(_, post)| matches!(post.way, Way::Quiet(..)));
        let slow: Vec<u32> =
            slow.filter(|(_, post)| post.began + limits.quiet <= now).map(|(number, _)| *number).collect();
        for number in slow {
            self.open_events(number, limits, now);
        }
        for post in self.posts.values() {
            match &post.way {
                Way::Quiet(..) => sooner(&mut next, post.began + limits.quiet),
                Way::Events(Some(stream)) => ping(stream, limits, now, &mut next),
                Way::Events(None) | Way::Lost => {}
            }
        }
        for stream in &self.general {
            ping(stream, limits, now, &mut next);
        }
        next
    }

    /// Everybody who waits is let go, with these last words where none were said yet.
    pub fn end(&mut self, last: fn() -> Box<Answer>) {
        for (_, post) in self.posts.drain() {
            match post.way {
                Way::Quiet(reply, _) => reply.tell(last()),
                Way::Events(Some(stream)) => stream.end(),
                Way::Events(None) | Way::Lost => {}
            }
        }
        for stream in self.general.drain(..) {
            stream.end();
        }
    }
}

pub fn sooner(next: &mut Option<Instant>, at: Instant) {
    *next = Some(next.map_or(at, |known| known.min(at)));
}

/// A stream that was silent for long gets a sign of life, by which we notice that its reader is gone.
pub fn ping(stream: &Stream, limits: &Limits, now: Instant, next: &mut Option<Instant>) {
    if stream.silent_since().is_some_and(|since| since + limits.ping <= now) {
        stream.put(Bytes::from_static(stream::PING), limits.stream_bytes_max, now);
    }
    sooner(next, stream.silent_since().unwrap_or(now) + limits.ping);
}

/// Answers of a batch, as one.
fn join(answers: &[Bytes], last: &Bytes) -> Bytes {
    let mut body =
        BytesMut::with_capacity(answers.iter().map(|answer| answer.len() + 1).sum::<usize>() + last.len() + 2);
    body.put_u8(b'[');
    for answer in answers {
        body.put_slice(answer.trim_ascii());
        body.put_u8(b',');
    }
    body.put_slice(last.trim_ascii());
    body.put_u8(b']');
    body.freeze()
}

/// Only as we write them.
fn read_event_id(id: &str) -> Option<(u32, u64)> {
    let (stream, number) = id.split_once('-')?;
    let plain = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    (plain(stream) && plain(number)).then(|| Some((stream.parse().ok()?, number.parse().ok()?)))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_ids_are_read_as_they_are_written() {
        let table = [
            ("0-1", Some((0, 1))),
            ("12-18446744073709551615", Some((12, u64::MAX))),
            ("", None),
            ("-", None),
            ("1-", None),
            ("-1", None),
            ("1", None),
            ("1-2-3", None),
            ("+1-2", None),
            ("4294967296-1", None),
            ("1-18446744073709551616", None),
            ("a-b", None),
        ];
        for (id, read) in table {
            assert_eq!(read_event_id(id), read, "{id:?}");
        }
    }
}
