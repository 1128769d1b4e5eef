//! One backend over HTTP, as a link: lines go in, lines come out, of either era.
//!
//! ```text
//! send ─ headers from the line ─ POST ──► JSON, or a stream of events ──► Said
//!                                 └ it breaks ─ again if that is safe ─► else Lost
//! ```
//!
//! Each message travels in a task of its own and reports here; the link alone knows the session, who waits for an answer
//! and when it is over. Every request that was sent ends in its answer, in [`Heard::Refused`] or in [`Heard::Lost`], before
//! [`Heard::Down`] if the link ends. A link that can take no more requests says so first ([`Heard::Failing`]), so that what
//! did not reach the server is not sent on it again.

mod client;
mod events;
mod exchange;
mod headers;
mod names;
mod refusal;
mod stream;
#[cfg(not(any(windows, target_os = "macos")))]
mod trust;
mod way;

pub use client::HttpClient;

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use hyper::{HeaderMap, Method, Uri, header::HeaderValue};
use outlast_core::{
    exit::How,
    gateway::Refused,
    message::{self, Id, Message},
};
use tokio::{
    sync::mpsc::{Receiver, Sender, channel},
    task::AbortHandle,
    time::{sleep, timeout},
};

use client::Target;
use exchange::Exchange;
use headers::ToolHeaders;
use stream::Stream;

/// What may wait to be heard; a server that says more is read more slowly.
const NEWS_MAX: usize = 64;

/// Where it is and what it wants to be told.
#[derive(Debug, Clone)]
pub struct HttpSettings {
    pub url: String,
    /// Credentials among them: they go to the origin of the url and nowhere else, and into no log.
    pub headers: BTreeMap<String, String>,
    /// The old transport: one stream, and another address to post to.
    pub is_sse: bool,
    pub patience: Patience,
}

/// Bounds of every wait but that for a call, which is limited by whoever calls.
#[derive(Debug, Clone)]
pub struct Patience {
    /// For the first word of an answer to what is quick by nature. Then it is lost.
    pub first_byte: Duration,
    /// How often the same is tried again where that is safe. Then it is lost, and with nobody there the link is down.
    pub tries: u32,
    /// Pauses between tries, doubled each time; a server that asks for more than the longest is taken at its no.
    pub retry_first: Duration,
    pub retry_longest: Duration,
    /// Pauses before a stream that ended is opened again.
    pub reconnect_first: Duration,
    pub reconnect_longest: Duration,
    /// How long a stream may stay open after the answer it was opened for, and a call after it was cancelled.
    pub linger: Duration,
    /// For the goodbye to a session.
    pub goodbye: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            first_byte: Duration::from_secs(30),
            tries: 3,
            retry_first: Duration::from_millis(100),
            retry_longest: Duration::from_secs(10),
            reconnect_first: Duration::from_secs(1),
            reconnect_longest: Duration::from_secs(60),
            linger: Duration::from_secs(2),
            goodbye: Duration::from_secs(2),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// One message, with whatever white space the server puts in.
    Said(Bytes),
    /// The same, in the stream of a request's answer: it was said for that request.
    SaidFor { id: Id, message: Bytes },
    /// This request will never be answered.
    Lost {
        id: Id,
        /// Whether any of it may have reached the server.
        was_sent: bool,
        why: String,
    },
    /// This request was answered with a status that says no.
    Refused { id: Id, refused: Box<Refused> },
    /// For the log.
    Note(String),
    /// The server answered 401 or 403 where no request waits for an answer.
    Denied(Box<Refused>),
    /// No further request is sent. What is open may still be answered.
    Failing(How),
    /// The link is over: nothing is heard after it.
    Down {
        why: String,
        /// The server is there, only our session is not: nothing speaks against a new one at once.
        is_forgotten: bool,
    },
}

/// What tasks report.
#[derive(Debug)]
enum News {
    /// The session is open.
    Opened {
        session: Option<HeaderValue>,
        version: Option<HeaderValue>,
    },
    Said {
        message: Bytes,
        answers: Option<Id>,
        /// In whose stream, if it is not its answer.
        within: Option<Id>,
    },
    Note(String),
    Endpoint(Uri),
    Ended {
        key: u64,
        end: End,
    },
    /// A call that was cancelled has had its time.
    Overdue(Id),
    Denied(Box<Refused>),
    Forgotten,
    Unreachable(String),
    SaidGoodbye,
}

/// How one exchange ended.
#[derive(Debug)]
enum End {
    Answered,
    /// Without an answer in it: all there is to say to a notification.
    Taken,
    Lost {
        was_sent: bool,
        why: String,
    },
    /// A status that says no.
    Refused(Box<Refused>),
    /// The server does not know our session any more. A request that it refused for that was not acted on; one whose
    /// answer was to be gone on with may have been.
    Forgotten {
        was_sent: bool,
        why: String,
    },
    /// There is no server.
    Unreachable(String),
}

#[derive(Debug)]
struct Flight {
    /// Nothing: it waits for no answer, or has it.
    waits: Option<Id>,
    is_stateless: bool,
    is_tools_list: bool,
    /// Its exchange is over; of the old transport, whose answers come apart.
    is_posted: bool,
    task: AbortHandle,
}

#[derive(Debug)]
enum Post {
    /// To where the backend is.
    Here,
    /// The old transport has not said where yet; what is sent waits.
    Unknown,
    To(Uri),
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    Open,
    /// `notifications/initialized` is on its way. On another connection a request could overtake it, and would be refused.
    Settling(u64),
    /// The session is gone, or the server is: what is open may still be answered, and nothing more is sent.
    Failing,
    Closing,
    Down,
}

/// One backend over HTTP. To be made and polled inside a tokio runtime.
pub struct HttpLink {
    target: Option<Arc<Target>>,
    patience: Patience,
    post: Post,
    state: State,
    session: Option<HeaderValue>,
    version: Option<HeaderValue>,
    tools: ToolHeaders,
    flights: HashMap<u64, Flight>,
    next_key: u64,
    /// Sent while it could not be posted yet.
    held: VecDeque<Bytes>,
    news: Receiver<News>,
    tell: Sender<News>,
    /// Known and not told yet.
    ready: VecDeque<Heard>,
    /// The end, told after everything else.
    down: Option<Heard>,
    /// Why nothing more is sent, and whether only the session is gone.
    failed: Option<(String, bool)>,
    stream: Option<AbortHandle>,
    waker: Option<Waker>,
}

impl HttpLink {
    /// Nothing is said before something is sent; only the old transport opens its stream. An address that is none is told
    /// like a server that is not there.
    pub fn connect(client: &HttpClient, settings: &HttpSettings) -> HttpLink {
        let (tell, news) = channel(NEWS_MAX);
        let mut link = HttpLink {
            target: None,
            patience: settings.patience.clone(),
            post: if settings.is_sse { Post::Unknown } else { Post::Here },
            state: State::Open,
            session: None,
            version: None,
            tools: ToolHeaders::default(),
            flights: HashMap::new(),
            next_key: 0,
            held: VecDeque::new(),
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

    /// One message. It is JSON: whoever sends has seen to that.
    pub fn send(&mut self, line: Bytes) {
        match self.state {
            State::Open if !matches!(self.post, Post::Unknown) => self.dispatch(line),
            State::Open | State::Settling(_) => self.held.push_back(line),
            State::Failing | State::Closing | State::Down => self.refuse(&line),
        }
    }

    /// The next thing heard. `Pending` wakes when there is more.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Heard> {
        loop {
            if let Some(heard) = self.ready.pop_front().or_else(|| self.down.take()) {
                return Poll::Ready(heard);
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

    /// Politely: the server is told that the session is over. Either way what waits for an answer is lost, and
    /// [`Heard::Down`] follows.
    pub fn close(&mut self, at_once: bool) {
        if matches!(self.state, State::Closing | State::Down) && !at_once {
            return;
        }
        match (&self.session, &self.target) {
            (Some(_), Some(target)) if !at_once && self.state != State::Failing => {
                let (target, headers) = (target.clone(), self.session_headers());
                let (tell, goodbye) = (self.tell.clone(), self.patience.goodbye);
                self.lose_all("the link was closed");
                self.state = State::Closing;
                self.stream = Some(
                    tokio::spawn(async move {
                        // A server that keeps a session longer than it needs to is none of our troubles.
                        let nothing = Bytes::new();
                        let _ = timeout(goodbye, target.ask(&Method::DELETE, &target.url, &headers, &nothing)).await;
                        let _ = tell.send(News::SaidGoodbye).await;
                    })
                    .abort_handle(),
                );
                self.wake();
            }
            _ => self.go_down("the link was closed".into()),
        }
    }

    fn learn(&mut self, news: News) {
        match news {
            News::Opened { session, version } => {
                self.session = session;
                self.version = version;
            }
            News::Said { message, answers, within } => {
                // An answer that nobody waits for any more was given up before it came.
                if answers.is_none_or(|id| self.note_answer(&id, &message)) {
                    self.ready.push_back(match within {
                        Some(id) => Heard::SaidFor { id, message },
                        None => Heard::Said(message),
                    });
                    self.end_if_done();
                }
            }
            News::Note(what) => self.ready.push_back(Heard::Note(what)),
            News::Endpoint(endpoint) => {
                self.post = Post::To(endpoint);
                self.release();
            }
            News::Ended { key, end } => self.ended(key, end),
            News::Overdue(id) => self.abort(&id, "it was cancelled"),
            News::Denied(refused) => self.ready.push_back(Heard::Denied(refused)),
            News::Forgotten => {
                self.fail(How::Forgot(self.forgotten()));
                self.end_if_done();
            }
            // Without its stream the old transport hears no answers.
            News::Unreachable(why) if !matches!(self.post, Post::Here) => self.go_down(why),
            News::Unreachable(why) => {
                self.fail(How::Lost(why));
                self.end_if_done();
            }
            News::SaidGoodbye => self.go_down("the link was closed".into()),
        }
    }

    /// Nothing more is sent; what is open goes on.
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
        self.ready.push_back(Heard::Failing(how));
        if let Some(stream) = self.stream.take_if(|_| matches!(self.post, Post::Here)) {
            stream.abort();
        }
        for line in std::mem::take(&mut self.held) {
            self.refuse(&line);
        }
        self.wake();
    }

    /// A link that failed is over when nothing is open any more.
    fn end_if_done(&mut self) {
        if self.state == State::Failing && self.flights.values().all(|flight| flight.waits.is_none()) {
            self.go_down("the link was closed".into());
        }
    }

    fn forgotten(&self) -> String {
        let name = self.target.as_ref().map_or_else(String::new, |target| target.name());
        format!("{name} has forgotten our session")
    }

    /// The answer may come on any stream. False: nobody waits for it.
    fn note_answer(&mut self, id: &Id, message: &[u8]) -> bool {
        let found = self.flights.iter_mut().find(|(_, flight)| flight.waits.as_ref() == Some(id));
        let Some((key, flight)) = found else { return false };
        flight.waits = None;
        if flight.is_tools_list {
            self.tools.learn(message);
        }
        // The old transport posts and hears apart: its POST may be long over.
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
            End::Answered | End::Taken => Some((true, "it was taken without an answer".to_owned())),
            End::Lost { was_sent, why } => Some((was_sent, why)),
            End::Refused(refused) => {
                self.ready.extend(waits.clone().map(|id| Heard::Refused { id, refused }));
                None
            }
            // First that the link failed, so that this request is sent on another one.
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
            self.ready.push_back(Heard::Lost { id, was_sent, why });
        }
        if is_settling && self.state == State::Open {
            self.listen();
            self.release();
        }
        self.end_if_done();
    }

    /// Opens the stream of a session for what the server says unasked.
    fn listen(&mut self) {
        let Some(target) = &self.target else { return };
        if matches!(self.post, Post::Here) && self.stream.is_none() {
            let stream = self.stream_of(target.clone(), self.session_headers());
            self.stream = Some(tokio::spawn(stream.listen()).abort_handle());
        }
    }

    fn stream_of(&self, target: Arc<Target>, headers: HeaderMap) -> Stream {
        Stream { target, headers, patience: self.patience.clone(), news: self.tell.clone() }
    }

    fn release(&mut self) {
        while self.state == State::Open {
            let Some(line) = self.held.pop_front() else { return };
            self.dispatch(line);
        }
    }

    fn dispatch(&mut self, line: Bytes) {
        let Some(target) = self.target.clone() else { return };
        let mut headers = headers::of_post();
        let (mut asks, mut is_stateless, mut is_tools_list) = (None, false, false);
        let (mut is_initialize, mut is_initialized, mut is_safe, mut cancels) = (false, false, false, None);
        match message::parse(&line) {
            Ok(Message::Request { id, method, params }) => {
                asks = id.parse();
                is_initialize = method == "initialize";
                is_tools_list = method == "tools/list";
                is_safe = is_safe_to_repeat(&method);
                if let Some(version) = headers::stated_version(&params) {
                    is_stateless = true;
                    headers.insert(headers::VERSION, version);
                    headers::describe(&mut headers, &method, &params, &self.tools);
                }
            }
            Ok(Message::Notification { method, params }) => {
                is_initialized = method == "notifications/initialized";
                if method == "notifications/cancelled" {
                    cancels = params.request_id().and_then(|id| Id::parse(id.get()));
                }
            }
            Ok(_) | Err(_) => {}
        }
        if let Some(id) = &cancels
            && self.flights.values().any(|flight| flight.is_stateless && flight.waits.as_ref() == Some(id))
        {
            // To close its stream is how a stateless request is cancelled.
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
            body: line,
            asks: asks.clone(),
            is_initialize,
            is_safe,
            is_apart: !matches!(self.post, Post::Here),
            is_resumable: !is_stateless && matches!(self.post, Post::Here),
            patience: self.patience.clone(),
            news: self.tell.clone(),
        };
        let task = match cancels {
            None => tokio::spawn(exchange.run()),
            Some(id) => {
                // A server that heeds it does not answer any more, so somebody must stop waiting.
                let (tell, linger) = (self.tell.clone(), self.patience.linger);
                tokio::spawn(async move {
                    exchange.run().await;
                    sleep(linger).await;
                    let _ = tell.send(News::Overdue(id)).await;
                })
            }
        };
        if is_initialized {
            self.state = State::Settling(key);
        }
        self.flights.insert(
            key,
            Flight { waits: asks, is_stateless, is_tools_list, is_posted: false, task: task.abort_handle() },
        );
    }

    /// What every request of a session carries.
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
            self.ready.push_back(Heard::Lost { id: id.clone(), was_sent: true, why: why.into() });
            self.wake();
        }
    }

    /// A line that is not sent any more: a request is lost, a cancellation still ends the wait for an answer.
    fn refuse(&mut self, line: &[u8]) {
        match message::parse(line) {
            Ok(Message::Request { id, .. }) => {
                if let Some(id) = id.parse() {
                    let why = self.failed.as_ref().map_or_else(|| "the link is over".into(), |(why, _)| why.clone());
                    self.ready.push_back(Heard::Lost { id, was_sent: false, why });
                    self.wake();
                }
            }
            Ok(Message::Notification { method, params }) if method == "notifications/cancelled" => {
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
                self.ready.push_back(Heard::Lost { id, was_sent: true, why: why.into() });
            }
        }
        if let Some(stream) = self.stream.take() {
            stream.abort();
        }
        for line in std::mem::take(&mut self.held) {
            self.refuse(&line);
        }
    }

    fn go_down(&mut self, why: String) {
        if self.state == State::Down {
            return;
        }
        self.fail(How::Lost(why.clone()));
        self.lose_all(&why);
        self.state = State::Down;
        let (why, is_forgotten) = self.failed.clone().unwrap_or((why, false));
        self.down = Some(Heard::Down { why, is_forgotten });
        self.wake();
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// Nobody else would end the tasks of a link that is dropped.
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

/// Questions that change nothing, and settings that are the same the second time.
fn is_safe_to_repeat(method: &str) -> bool {
    matches!(
        method,
        "ping"
            | "server/discover"
            | "tools/list"
            | "prompts/list"
            | "prompts/get"
            | "resources/list"
            | "resources/templates/list"
            | "resources/read"
            | "resources/subscribe"
            | "resources/unsubscribe"
            | "completion/complete"
            | "logging/setLevel"
            | "tasks/get"
            | "tasks/list"
    )
}
