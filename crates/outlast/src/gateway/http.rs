//! One backend over HTTP, as a link: lines go in, lines come out, of either era.
//!
//! ```text
//! send ─ headers from the line ─ POST ──► JSON, or a stream of events ──► Said
//!                                 └ it breaks ─ again if that is safe ─► else Lost
//! ```
//!
//! Each message is posted by a task of its own, which reports here. Only the link knows the session, the requests
//! without an answer, and when it ends. Every request ends in its answer, in [`LinkEvent::Refused`] or in [`LinkEvent::Lost`],
//! and before [`LinkEvent::Down`] if the link ends. A link that accepts no more requests first reports [`LinkEvent::Failing`],
//! so that requests that did not reach the server are not sent on it again.

mod client;
mod events;
mod exchange;
mod headers;
mod proxy;
mod refusal;
mod resolver;
mod stream;
#[cfg(not(any(windows, target_os = "macos")))]
mod trust;

pub use client::HttpClient;
pub(crate) use client::post;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use hyper::{HeaderMap, Method, Uri, header::HeaderValue};
use outlast_core::{
    exit::How,
    gateway::Refused,
    mcp::{method, notification},
    message::{self, Id, Message, PARSED_AT_ONCE_MAX, Unreadable, Walk},
};
use outlast_os::offload::{Task, compute_for_server};
use tokio::{
    sync::mpsc::{Receiver, Sender, channel},
    task::AbortHandle,
    time::{sleep, timeout},
};

use client::Target;
use exchange::Exchange;
use headers::{Page, ToolHeaders};
use stream::Stream;

/// Reports of tasks in the queue. When it is full, the server is read more slowly.
const NEWS_MAX: usize = 64;

/// The address of a server and its settings.
#[derive(Debug, Clone)]
pub struct HttpSettings {
    pub url: String,
    /// They include credentials: they are sent only to the origin of the URL, and are not logged.
    pub headers: BTreeMap<String, String>,
    /// The old transport: one stream, and a separate address for POST requests.
    pub is_sse: bool,
    pub limits: WaitLimits,
}

/// Limits of every wait except that for a call, which the caller limits.
#[derive(Debug, Clone)]
pub struct WaitLimits {
    /// For the first byte of the answer to a quick request. Then the request is lost.
    pub first_byte: Duration,
    /// How often a request is repeated where that is safe. Then it is lost; if the server is unreachable, the link
    /// ends.
    pub tries: u32,
    /// Pauses between attempts, doubled each time. A server that asks for more than the longest pause has refused.
    pub retry_first: Duration,
    pub retry_longest: Duration,
    /// Pauses before a stream that ended is opened again.
    pub reconnect_first: Duration,
    pub reconnect_longest: Duration,
    /// How long a stream may stay open after its answer, and a call after it was cancelled.
    pub linger: Duration,
    /// For the DELETE request that ends a session.
    pub session_end: Duration,
}

impl Default for WaitLimits {
    fn default() -> WaitLimits {
        WaitLimits {
            first_byte: Duration::from_secs(30),
            tries: 3,
            retry_first: Duration::from_millis(100),
            retry_longest: Duration::from_secs(10),
            reconnect_first: Duration::from_secs(1),
            reconnect_longest: Duration::from_secs(60),
            linger: Duration::from_secs(2),
            session_end: Duration::from_secs(2),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// One message, with the white space that the server put in.
    Said(Bytes),
    /// The same, in the response stream of a request: it belongs to that request.
    SaidFor { id: Id, message: Bytes },
    /// One of both, which was parsed before, because it is long.
    SaidLong { within: Option<Id>, message: Bytes, walk: Box<Walk> },
    /// This request will not be answered.
    Lost {
        id: Id,
        /// Whether a part of it may have reached the server.
        was_sent: bool,
        why: String,
    },
    /// This request was refused with an HTTP status.
    Refused { id: Id, refused: Box<Refused> },
    /// For the log.
    Note(String),
    /// The server answered 401 or 403 outside of a request.
    Denied(Box<Refused>),
    /// No further request is sent. Open requests may still be answered.
    Failing(How),
    /// The link has ended; this is its last report.
    Down {
        why: String,
        /// The server is reachable and only the session is lost, so a new session can be opened at once.
        is_forgotten: bool,
    },
}

/// A session at an HTTP backend as saved state.
#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct SavedHttp {
    session: Option<String>,
    version: Option<String>,
}

/// What tasks report.
#[derive(Debug)]
enum TaskReport {
    /// The session is open.
    Opened {
        session: Option<HeaderValue>,
        version: Option<HeaderValue>,
    },
    Said {
        message: Bytes,
        answers: Option<Id>,
        /// The request in whose stream it arrived, if it is not its answer.
        within: Option<Id>,
        /// Of a long message.
        walk: Option<Box<Walk>>,
    },
    Note(String),
    Endpoint(Uri),
    Ended {
        key: u64,
        end: End,
    },
    /// The time limit of a cancelled call has passed.
    Overdue(Id),
    Denied(Box<Refused>),
    Forgotten,
    Unreachable(String),
    SessionEnded,
}

/// How one exchange ended.
#[derive(Debug)]
enum End {
    Answered,
    /// Accepted without an answer, as for a notification.
    Taken,
    Lost {
        was_sent: bool,
        why: String,
    },
    /// An HTTP status that is not a success.
    Refused(Box<Refused>),
    /// The server does not know the session any more. It did not act on a request that it refused for that reason; it
    /// may have acted on one whose stream was to be resumed.
    Forgotten {
        was_sent: bool,
        why: String,
    },
    /// The server cannot be reached.
    Unreachable(String),
}

#[derive(Debug)]
struct Flight {
    /// `None` if it needs no answer or has its answer.
    waits: Option<Id>,
    is_stateless: bool,
    /// A page of the list of tools.
    page: Option<Page>,
    /// The POST is complete. Only for the old transport, whose answers arrive on another stream.
    is_posted: bool,
    task: AbortHandle,
}

/// A message that is parsed beside the loop.
struct Parsing {
    line: Bytes,
    walk: Task<Walk>,
}

#[derive(Debug)]
enum Post {
    /// At the address of the backend.
    Here,
    /// The old transport has not sent its address yet; messages wait.
    Unknown,
    To(Uri),
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Open,
    /// `notifications/initialized` is being sent. A request on another connection could overtake it and would be
    /// refused.
    Settling(u64),
    /// The session or the server is lost: open requests may still be answered, and nothing more is sent.
    Failing,
    Closing,
    Down,
}

/// One backend over HTTP. It must be created and polled inside a tokio runtime.
pub struct HttpLink {
    target: Option<Arc<Target>>,
    limits: WaitLimits,
    post: Post,
    state: State,
    session: Option<HeaderValue>,
    version: Option<HeaderValue>,
    tools: ToolHeaders,
    flights: HashMap<u64, Flight>,
    next_key: u64,
    /// Messages that cannot be posted yet.
    held: VecDeque<Bytes>,
    /// A long message, before it is posted or refused. Later messages wait for it.
    parsing: Option<Parsing>,
    news: Receiver<TaskReport>,
    tell: Sender<TaskReport>,
    /// Reports that are not returned yet.
    ready: VecDeque<LinkEvent>,
    /// The end of the link, reported last.
    down: Option<LinkEvent>,
    /// Why nothing more is sent, and whether only the session is lost.
    failed: Option<(String, bool)>,
    stream: Option<AbortHandle>,
    waker: Option<Waker>,
}

impl HttpLink {
    /// Sends nothing before the first message, except that the old transport opens its stream. An invalid address is
    /// reported like an unreachable server.
    pub fn connect(client: &HttpClient, settings: &HttpSettings) -> HttpLink {
        let (tell, news) = channel(NEWS_MAX);
        let mut link = HttpLink {
            target: None,
            limits: settings.limits.clone(),
            post: if settings.is_sse { Post::Unknown } else { Post::Here },
            state: State::Open,
            session: None,
            version: None,
            tools: ToolHeaders::default(),
            flights: HashMap::new(),
            next_key: 0,
            held: VecDeque::new(),
            parsing: None,
            news,
            tell,
            ready: VecDeque::new(),
            down: None,
            failed: None,
            stream: None,
            waker: None,
        };
        match Target::new(client.clone(), &settings.url, &settings.headers) {
            Err(why) => link.go_down(why),
            Ok(target) => {
                let target = Arc::new(target);
                link.target = Some(target.clone());
                if settings.is_sse {
                    let stream = link.stream_of(target, HeaderMap::new());
                    link.stream = Some(tokio::spawn(stream.listen_to_old()).abort_handle());
                }
            }
        }
        link
    }

    /// A message is under way, other than requests that the gateway knows of.
    #[cfg(unix)]
    pub(crate) fn is_busy(&self) -> bool {
        self.state != State::Open
            || !self.held.is_empty()
            || self.parsing.is_some()
            || !self.ready.is_empty()
            || self.flights.values().any(|flight| flight.waits.is_none())
    }

    /// The session, for the next program. None with the old transport, whose stream is its session.
    #[cfg(unix)]
    pub(crate) fn save(&self) -> Option<SavedHttp> {
        let text = |value: &HeaderValue| value.to_str().ok().map(str::to_owned);
        matches!(self.post, Post::Here).then(|| SavedHttp {
            session: self.session.as_ref().and_then(text),
            version: self.version.as_ref().and_then(text),
        })
    }

    /// Continues with a session that the last program of this process has opened. `tools` are those that the server lists.
    #[cfg(unix)]
    pub(crate) fn resume(client: &HttpClient, settings: &HttpSettings, saved: &SavedHttp, tools: &[Bytes]) -> HttpLink {
        let mut link = HttpLink::connect(client, settings);
        let value = |text: &String| HeaderValue::from_str(text).ok();
        link.session = saved.session.as_ref().and_then(value);
        link.version = saved.version.as_ref().and_then(value);
        link.tools = ToolHeaders::of_list(tools.iter().map(AsRef::as_ref));
        if link.session.is_some() || link.version.is_some() {
            link.listen();
        }
        link
    }

    /// Sends one message. The caller has checked that it is JSON.
    pub fn send(&mut self, line: Bytes) {
        self.held.push_back(line);
        self.release();
    }

    /// The next report. `Pending` wakes when there is one.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<LinkEvent> {
        loop {
            let is_over = self.parsing.is_none() && self.held.is_empty();
            if let Some(heard) = self.ready.pop_front().or_else(|| self.down.take_if(|_| is_over)) {
                return Poll::Ready(heard);
            }
            if self.poll_parsing(cx) {
                continue;
            }
            if self.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
                self.waker = Some(cx.waker().clone());
            }
            match self.news.poll_recv(cx) {
                Poll::Pending | Poll::Ready(None) => return Poll::Pending,
                Poll::Ready(Some(_)) if self.state == State::Down => {}
                Poll::Ready(Some(news)) => self.learn(news),
            }
        }
    }

    /// Gracefully: the server is told that the session has ended. In both cases open requests are lost, and
    /// [`LinkEvent::Down`] follows.
    pub fn close(&mut self, at_once: bool) {
        if matches!(self.state, State::Closing | State::Down) && !at_once {
            return;
        }
        match (&self.session, &self.target) {
            (Some(_), Some(target)) if !at_once && self.state != State::Failing => {
                let (target, headers) = (target.clone(), self.session_headers());
                let (tell, session_end) = (self.tell.clone(), self.limits.session_end);
                self.lose_all("the link was closed");
                self.state = State::Closing;
                self.release();
                self.stream = Some(
                    tokio::spawn(async move {
                        // A server that keeps a session longer than needed is no error of ours.
                        let nothing = Bytes::new();
                        let _ =
                            timeout(session_end, target.ask(&Method::DELETE, &target.url, &headers, &nothing)).await;
                        let _ = tell.send(TaskReport::SessionEnded).await;
                    })
                    .abort_handle(),
                );
                self.wake();
            }
            _ => self.go_down("the link was closed".into()),
        }
    }

    fn learn(&mut self, news: TaskReport) {
        match news {
            TaskReport::Opened { session, version } => {
                self.session = session;
                self.version = version;
            }
            TaskReport::Said { message, answers, within, walk } => {
                // The request was given up before this answer arrived.
                if answers.is_none_or(|id| self.note_answer(&id, &message, walk.as_deref())) {
                    self.ready.push_back(match (walk, within) {
                        (Some(walk), within) => LinkEvent::SaidLong { within, message, walk },
                        (None, Some(id)) => LinkEvent::SaidFor { id, message },
                        (None, None) => LinkEvent::Said(message),
                    });
                    self.end_if_done();
                }
            }
            TaskReport::Note(what) => self.ready.push_back(LinkEvent::Note(what)),
            TaskReport::Endpoint(endpoint) => {
                self.post = Post::To(endpoint);
                self.release();
            }
            TaskReport::Ended { key, end } => self.ended(key, end),
            TaskReport::Overdue(id) => self.abort(&id, "it was cancelled"),
            TaskReport::Denied(refused) => self.ready.push_back(LinkEvent::Denied(refused)),
            TaskReport::Forgotten => {
                self.fail(How::Forgot(self.forgotten()));
                self.end_if_done();
            }
            // Without its stream the old transport receives no answers.
            TaskReport::Unreachable(why) if !matches!(self.post, Post::Here) => self.go_down(why),
            TaskReport::Unreachable(why) => {
                self.fail(How::Lost(why));
                self.end_if_done();
            }
            TaskReport::SessionEnded => self.go_down("the link was closed".into()),
        }
    }

    /// Nothing more is sent; open requests continue.
    fn fail(&mut self, how: How) {
        if matches!(self.state, State::Failing | State::Closing | State::Down) {
            return;
        }
        self.state = State::Failing;
        self.failed = match &how {
            How::Forgot(why) => Some((why.clone(), true)),
            How::Lost(why) => Some((why.clone(), false)),
            how => Some((how.to_string(), false)),
        };
        self.ready.push_back(LinkEvent::Failing(how));
        if let Some(stream) = self.stream.take_if(|_| matches!(self.post, Post::Here)) {
            stream.abort();
        }
        self.release();
        self.wake();
    }

    /// A link that failed ends when no request is open.
    fn end_if_done(&mut self) {
        if self.state == State::Failing && self.flights.values().all(|flight| flight.waits.is_none()) {
            self.go_down("the link was closed".into());
        }
    }

    fn forgotten(&self) -> String {
        let name = self.target.as_ref().map_or_else(String::new, |target| target.name());
        format!("{name} does not know our session any more")
    }

    /// The answer may arrive on any stream. False if no request waits for it.
    fn note_answer(&mut self, id: &Id, message: &[u8], walk: Option<&Walk>) -> bool {
        let found = self.flights.iter_mut().find(|(_, flight)| flight.waits.as_ref() == Some(id));
        let Some((key, flight)) = found else { return false };
        flight.waits = None;
        if let Some(page) = flight.page.take() {
            self.tools.learn_answer(page, message, walk);
        }
        // The old transport has separate streams: its POST may have ended long before.
        let key = *key;
        if flight.is_posted {
            self.flights.remove(&key);
        }
        true
    }

    fn ended(&mut self, key: u64, end: End) {
        let is_settling = self.state == State::Settling(key);
        if is_settling {
            self.state = State::Open;
        }
        let Some(flight) = self.flights.get_mut(&key) else { return };
        if matches!(end, End::Taken) && !matches!(self.post, Post::Here) && flight.waits.is_some() {
            flight.is_posted = true;
            return;
        }
        let waits = flight.waits.take();
        self.flights.remove(&key);
        let lost = match end {
            End::Answered | End::Taken => Some((true, "it was accepted without an answer".to_owned())),
            End::Lost { was_sent, why } => Some((was_sent, why)),
            End::Refused(refused) => {
                self.ready.extend(waits.clone().map(|id| LinkEvent::Refused { id, refused }));
                None
            }
            // First that the link failed, so that this request is repeated on another one.
            End::Forgotten { was_sent, why } => {
                self.fail(How::Forgot(self.forgotten()));
                Some((was_sent, why))
            }
            End::Unreachable(why) => {
                self.fail(How::Lost(why.clone()));
                Some((false, why))
            }
        };
        if let (Some((was_sent, why)), Some(id)) = (lost, waits) {
            self.ready.push_back(LinkEvent::Lost { id, was_sent, why });
        }
        if is_settling && self.state == State::Open {
            self.listen();
            self.release();
        }
        self.end_if_done();
    }

    /// Opens the GET stream of a session, for messages that belong to no request.
    fn listen(&mut self) {
        let Some(target) = &self.target else { return };
        if matches!(self.post, Post::Here) && self.stream.is_none() {
            let stream = self.stream_of(target.clone(), self.session_headers());
            self.stream = Some(tokio::spawn(stream.listen()).abort_handle());
        }
    }

    fn stream_of(&self, target: Arc<Target>, headers: HeaderMap) -> Stream {
        Stream { target, headers, limits: self.limits.clone(), news: self.tell.clone() }
    }

    /// Posts the messages that wait, or refuses them if nothing is sent any more.
    fn release(&mut self) {
        loop {
            let must_wait = match self.state {
                State::Open => matches!(self.post, Post::Unknown),
                State::Settling(_) => true,
                State::Failing | State::Closing | State::Down => false,
            };
            if must_wait || self.parsing.is_some() {
                return;
            }
            let Some(line) = self.held.pop_front() else { return };
            if line.len() > PARSED_AT_ONCE_MAX {
                let text = line.clone();
                self.parsing = Some(Parsing { line, walk: compute_for_server(move || Walk::of(&text)) });
                return self.wake();
            }
            self.pass(&line, message::parse(&line));
        }
    }

    /// True if a long message was parsed.
    fn poll_parsing(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(parsing) = &mut self.parsing else { return false };
        let Poll::Ready(walk) = Pin::new(&mut parsing.walk).poll(cx) else { return false };
        let Parsing { line, .. } = self.parsing.take().expect("found above");
        // Without a thread it is parsed here.
        self.pass(&line, walk.map_or_else(|_| message::parse(&line), |walk| walk.read(&line)));
        self.release();
        true
    }

    fn pass(&mut self, line: &Bytes, message: Result<Message<'_>, Unreadable>) {
        match self.state {
            State::Open | State::Settling(_) => self.dispatch(line, message),
            State::Failing | State::Closing | State::Down => self.refuse(message),
        }
    }

    fn dispatch(&mut self, line: &Bytes, message: Result<Message<'_>, Unreadable>) {
        let Some(target) = self.target.clone() else { return };
        let mut headers = headers::of_post();
        let (mut asks, mut is_stateless, mut page) = (None, false, None);
        let (mut is_initialize, mut is_initialized, mut is_safe, mut cancels) = (false, false, false, None);
        match message {
            Ok(Message::Request { id, method, params }) => {
                asks = id.parse();
                is_initialize = method == method::INITIALIZE;
                if method == method::TOOLS_LIST {
                    page = Some(if params.cursor().is_none() { Page::First } else { Page::Later });
                }
                is_safe = is_safe_to_repeat(&method);
                if let Some(version) = headers::stated_version(&params) {
                    is_stateless = true;
                    headers.insert(headers::VERSION, version);
                    headers::describe(&mut headers, &method, &params, &self.tools);
                }
            }
            Ok(Message::Notification { method, params }) => {
                is_initialized = method == notification::INITIALIZED;
                if method == notification::CANCELLED {
                    cancels = params.request_id().and_then(|id| Id::parse(id.get()));
                }
            }
            Ok(_) | Err(_) => {}
        }
        if let Some(id) = &cancels
            && self.flights.values().any(|flight| flight.is_stateless && flight.waits.as_ref() == Some(id))
        {
            // A stateless request is cancelled by closing its stream.
            return self.abort(id, "it was cancelled");
        }
        if !is_stateless {
            if !is_initialize {
                headers.extend(self.session_headers());
            }
            is_safe |= asks.is_none() && cancels.is_some();
        }
        let key = self.next_key;
        self.next_key += 1;
        let url = match &self.post {
            Post::To(url) => url.clone(),
            Post::Here | Post::Unknown => target.url.clone(),
        };
        let exchange = Exchange {
            key,
            target,
            url,
            headers,
            body: line.clone(),
            asks: asks.clone(),
            is_initialize,
            is_safe,
            is_apart: !matches!(self.post, Post::Here),
            is_resumable: !is_stateless && matches!(self.post, Post::Here),
            limits: self.limits.clone(),
            news: self.tell.clone(),
        };
        let task = match cancels {
            None => tokio::spawn(exchange.run()),
            Some(id) => {
                // A server that obeys the cancellation does not answer, so the wait needs a limit.
                let (tell, linger) = (self.tell.clone(), self.limits.linger);
                tokio::spawn(async move {
                    exchange.run().await;
                    sleep(linger).await;
                    let _ = tell.send(TaskReport::Overdue(id)).await;
                })
            }
        };
        if is_initialized {
            self.state = State::Settling(key);
        }
        self.flights
            .insert(key, Flight { waits: asks, is_stateless, page, is_posted: false, task: task.abort_handle() });
    }

    /// The headers of every request of a session.
    fn session_headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(session) = &self.session {
            headers.insert(headers::SESSION, session.clone());
        }
        if let Some(version) = &self.version {
            headers.insert(headers::VERSION, version.clone());
        }
        headers
    }

    fn abort(&mut self, id: &Id, why: &str) {
        let Some(key) =
            self.flights.iter().find_map(|(key, flight)| (flight.waits.as_ref() == Some(id)).then_some(*key))
        else {
            return;
        };
        if let Some(flight) = self.flights.remove(&key) {
            flight.task.abort();
            self.ready.push_back(LinkEvent::Lost { id: id.clone(), was_sent: true, why: why.into() });
            self.wake();
        }
    }

    /// A message that is not sent any more: a request is lost, a cancellation still ends the wait for an answer.
    fn refuse(&mut self, message: Result<Message<'_>, Unreadable>) {
        match message {
            Ok(Message::Request { id, .. }) => {
                if let Some(id) = id.parse() {
                    let why = self.failed.as_ref().map_or_else(|| "the link was closed".into(), |(why, _)| why.clone());
                    self.ready.push_back(LinkEvent::Lost { id, was_sent: false, why });
                    self.wake();
                }
            }
            Ok(Message::Notification { method, params }) if method == notification::CANCELLED => {
                if let Some(id) = params.request_id().and_then(|id| Id::parse(id.get())) {
                    self.abort(&id, "it was cancelled");
                    self.end_if_done();
                }
            }
            _ => {}
        }
    }

    fn lose_all(&mut self, why: &str) {
        let mut flights: Vec<_> = self.flights.drain().collect();
        flights.sort_by_key(|(key, _)| *key);
        for (_, flight) in flights {
            flight.task.abort();
            if let Some(id) = flight.waits {
                self.ready.push_back(LinkEvent::Lost { id, was_sent: true, why: why.into() });
            }
        }
        if let Some(stream) = self.stream.take() {
            stream.abort();
        }
    }

    fn go_down(&mut self, why: String) {
        if self.state == State::Down {
            return;
        }
        self.fail(How::Lost(why.clone()));
        self.lose_all(&why);
        self.state = State::Down;
        self.release();
        let (why, is_forgotten) = self.failed.clone().unwrap_or((why, false));
        self.down = Some(LinkEvent::Down { why, is_forgotten });
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// The tasks of a dropped link must be aborted here.
impl Drop for HttpLink {
    fn drop(&mut self) {
        for flight in self.flights.values() {
            flight.task.abort();
        }
        if let Some(stream) = &self.stream {
            stream.abort();
        }
    }
}

/// Requests that change nothing, and settings that are idempotent.
fn is_safe_to_repeat(method: &str) -> bool {
    matches!(
        method,
        method::PING
            | method::DISCOVER
            | method::TOOLS_LIST
            | method::PROMPTS_LIST
            | method::PROMPTS_GET
            | method::RESOURCES_LIST
            | method::TEMPLATES_LIST
            | method::RESOURCES_READ
            | method::SUBSCRIBE
            | method::UNSUBSCRIBE
            | method::COMPLETE
            | method::SET_LEVEL
            | method::TASKS_GET
            | method::TASKS_LIST
    )
}
