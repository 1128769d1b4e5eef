//! One POST and all messages in its response. It repeats the request only where that is safe.

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Method, Response, StatusCode, Uri,
    body::Incoming,
    header::{ACCEPT, CONTENT_TYPE, HeaderValue},
};
use outlast_core::{
    json::Raw,
    message::{self, Id, Message, PARSED_AT_ONCE_MAX, Walk},
};
use outlast_os::offload::compute_for_server;
use tokio::{
    sync::mpsc::Sender,
    task::yield_now,
    time::{Instant, sleep, timeout, timeout_at},
};

use super::{
    End, TaskReport, WaitLimits,
    client::{Failed, Target, cause},
    events::{Event, Events},
    headers,
    refusal::{REFUSAL_MAX, Refusal},
};
use crate::{child::lines::LINE_MAX, state::home};

pub(super) struct Exchange {
    pub(super) key: u64,
    pub(super) target: Arc<Target>,
    pub(super) url: Uri,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// `None` for a notification or an answer, which get no answer.
    pub(super) asks: Option<Id>,
    pub(super) is_initialize: bool,
    /// Repeating the request has no further effect.
    pub(super) is_safe: bool,
    /// The answer arrives on another stream; the response here only says whether the request was accepted.
    pub(super) is_apart: bool,
    /// A broken stream can be resumed.
    pub(super) is_resumable: bool,
    pub(super) limits: WaitLimits,
    pub(super) news: Sender<TaskReport>,
}

impl Exchange {
    pub(super) async fn run(self) {
        let end = self.carry().await;
        // The send fails if the link was dropped.
        let _ = self.news.send(TaskReport::Ended { key: self.key, end }).await;
    }

    async fn carry(&self) -> End {
        let mut tries = Tries::new(&self.limits);
        loop {
            let response = match self.ask().await {
                Ok(response) => response,
                Err(failed) => {
                    if (!failed.was_sent || self.is_safe)
                        && let Some(delay) = tries.next(None)
                    {
                        sleep(delay).await;
                        continue;
                    }
                    return match failed.is_unreachable {
                        true => End::Unreachable(failed.why),
                        false => End::Lost { was_sent: failed.was_sent, why: failed.why },
                    };
                }
            };
            return match response.status().is_success() {
                true => self.hear(response).await,
                false => self.hear_refusal(response).await,
            };
        }
    }

    /// A call has no limit here: a server that answers in JSON sends nothing before it is done. Quick requests have a
    /// limit.
    async fn ask(&self) -> Result<Response<Incoming>, Failed> {
        let asking = self.target.ask(&Method::POST, &self.url, &self.headers, &self.body);
        if self.asks.is_some() && !self.is_safe {
            // Lets the pool notice connections that the server closed meanwhile. On one of them, a lost request could
            // not be told from one that the server received.
            yield_now().await;
            return asking.await;
        }
        let max = self.limits.first_byte;
        timeout(max, asking).await.unwrap_or_else(|_| {
            let why = format!("{} sent nothing for {} s", self.target.name(), max.as_secs_f32());
            Err(Failed { was_sent: true, is_unreachable: false, why })
        })
    }

    async fn hear(&self, response: Response<Incoming>) -> End {
        match (Kind::of(&response), self.asks.as_ref().filter(|_| !self.is_apart)) {
            (Kind::Events, _) if !self.is_apart => self.hear_events(response).await,
            (_, None) => {
                // After its body was read to the end, a connection can be used again.
                let _ = timeout(self.limits.linger, collect(response, REFUSAL_MAX)).await;
                End::Taken
            }
            (Kind::Json, Some(_)) => self.hear_json(response).await,
            (Kind::Other(kind), Some(_)) if response.status() == StatusCode::OK => lost(format!(
                "{} answered with `{kind}`, which is neither JSON nor an event stream",
                self.target.name()
            )),
            (Kind::Events | Kind::Other(_), Some(_)) => End::Taken,
        }
    }

    async fn hear_json(&self, response: Response<Incoming>) -> End {
        let status = response.status();
        let session = response.headers().get(headers::SESSION).cloned();
        let body = match collect(response, LINE_MAX).await {
            Ok(body) => body,
            Err(why) => return lost(format!("{} {why}", self.target.name())),
        };
        if body.iter().all(u8::is_ascii_whitespace) && status != StatusCode::OK {
            return End::Taken;
        }
        match self.say(body, session).await {
            Ok(true) => End::Answered,
            Ok(false) => lost(format!("{} sent an answer without this request's id", self.target.name())),
            Err(error) => lost(format!("{} answered with invalid JSON: {error}", self.target.name())),
        }
    }

    async fn hear_events(&self, response: Response<Incoming>) -> End {
        let session = response.headers().get(headers::SESSION).cloned();
        let mut events = Events::new(LINE_MAX);
        let mut response = response;
        let mut tries = Tries::new(&self.limits);
        let mut is_answered = false;
        loop {
            let why = match self.drain(response, &mut events, &session, &mut is_answered, &mut tries).await {
                Drained::Ended(why) => why,
                Drained::Over(end) => return end,
            };
            if is_answered {
                return End::Answered;
            }
            let broke = match self.asks {
                None => return End::Taken,
                Some(_) => format!("{} broke off its answer: {why}", self.target.name()),
            };
            if !self.is_resumable || events.last_id.is_none() {
                return lost(broke);
            }
            response = loop {
                let asked_for = events.retry_ms.map(Duration::from_millis);
                let Some(delay) = tries.next(asked_for) else { return lost(broke) };
                sleep(delay).await;
                match self.resume(&events).await {
                    Ok(response) if response.status().is_success() => break response,
                    Ok(response) if response.status().is_client_error() => {
                        // The request itself was accepted, by a server that knew the session.
                        let refusal = read_refusal(response, &self.limits).await;
                        let is_forgotten = refusal.forgets_session(None);
                        return if is_forgotten { End::Forgotten { was_sent: true, why: broke } } else { lost(broke) };
                    }
                    Ok(_) | Err(_) => {}
                }
            };
            events.begin_again();
        }
    }

    /// Reads one stream to its end. After the answer, the wait for the rest is short.
    async fn drain(
        &self,
        response: Response<Incoming>,
        events: &mut Events,
        session: &Option<HeaderValue>,
        is_answered: &mut bool,
        tries: &mut Tries,
    ) -> Drained {
        let mut body = response.into_body();
        let mut until = None;
        loop {
            let frame = match until {
                None => body.frame().await,
                Some(until) => match timeout_at(until, body.frame()).await {
                    Ok(frame) => frame,
                    Err(_) => return Drained::Over(End::Answered),
                },
            };
            let chunk = match frame {
                None => return Drained::Ended("the stream ended".into()),
                Some(Err(error)) => return Drained::Ended(cause(&error)),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) => chunk,
                    Err(_) => continue,
                },
            };
            events.push(&chunk);
            while let Some(event) = events.next_event() {
                tries.succeed();
                match event {
                    Event::Message(data) => match self.say(data, session.clone()).await {
                        Ok(is_ours) => *is_answered |= is_ours,
                        Err(error) => self.note(format!("an event is not JSON and was dropped: {error}")).await,
                    },
                    Event::TooLong if self.asks.is_some() => {
                        return Drained::Over(lost(too_long(&self.target.name())));
                    }
                    Event::TooLong => self.note("an event is too long and was dropped".into()).await,
                    Event::Endpoint(_) => {}
                }
            }
            if *is_answered && until.is_none() {
                until = Some(Instant::now() + self.limits.linger);
            }
        }
    }

    async fn resume(&self, events: &Events) -> Result<Response<Incoming>, Failed> {
        let mut headers = self.headers.clone();
        headers.remove(CONTENT_TYPE);
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(id) = events.last_id.as_deref().and_then(|id| HeaderValue::try_from(id).ok()) {
            headers.insert(headers::LAST_EVENT, id);
        }
        self.target.ask(&Method::GET, &self.url, &headers, &Bytes::new()).await
    }

    /// Forwards each message. True if the answer was among them.
    async fn say(&self, text: Bytes, session: Option<HeaderValue>) -> Result<bool, String> {
        let heard = pieces(&text).await?;
        let mut is_ours = false;
        for Piece { message, answers, walk } in heard {
            let is_answer = answers.is_some() && answers == self.asks;
            if is_answer && self.is_initialize {
                let parsed = walk.as_ref().map_or_else(|| message::parse(&message), |walk| walk.read(&message));
                let version = parsed.ok().and_then(|answer| negotiated(&answer));
                let _ = self.news.send(TaskReport::Opened { session: session.clone(), version }).await;
            }
            is_ours |= is_answer;
            let within = if answers.is_none() { self.asks.clone() } else { None };
            let _ = self.news.send(TaskReport::Said { message, answers, within, walk }).await;
        }
        Ok(is_ours)
    }

    async fn note(&self, what: String) {
        let _ = self.news.send(TaskReport::Note(format!("{}: {what}", self.target.name()))).await;
    }

    /// A response with an error status. An error of JSON-RPC is an answer like any other; the machine decides what an
    /// HTTP status means.
    async fn hear_refusal(&self, response: Response<Incoming>) -> End {
        let has_session = self.headers.contains_key(headers::SESSION) || self.is_apart;
        let refusal = read_refusal(response, &self.limits).await;
        if has_session && refusal.forgets_session(self.asks.as_ref()) {
            return End::Forgotten { was_sent: false, why: refusal.words(&self.target.name()) };
        }
        let Some(id) = &self.asks else {
            if refusal.is_denied() {
                let refused = refusal.refused(&self.target.name(), self.body.clone());
                let _ = self.news.send(TaskReport::Denied(refused)).await;
            } else {
                self.note(refusal.words(&self.target.name())).await;
            }
            return End::Taken;
        };
        if let Some(message) = refusal.answer(id) {
            let said = TaskReport::Said { message, answers: Some(id.clone()), within: None, walk: None };
            let _ = self.news.send(said).await;
            return End::Answered;
        }
        End::Refused(refusal.refused(&self.target.name(), self.body.clone()))
    }
}

pub(super) async fn read_refusal(response: Response<Incoming>, limits: &WaitLimits) -> Refusal {
    let (status, headers) = (response.status(), response.headers().clone());
    let body = match timeout(limits.first_byte, collect(response, REFUSAL_MAX)).await {
        Ok(Ok(body)) => body,
        Ok(Err(_)) | Err(_) => Bytes::new(),
    };
    Refusal::new(status, &headers, body)
}

enum Drained {
    Ended(String),
    Over(End),
}

/// The content type of a response.
enum Kind {
    Json,
    Events,
    Other(String),
}

impl Kind {
    fn of(response: &Response<Incoming>) -> Kind {
        let Some(value) = response.headers().get(CONTENT_TYPE) else { return Kind::Json };
        let value = value.to_str().unwrap_or_default();
        let essence = value.split(';').next().unwrap_or_default().trim();
        if essence.eq_ignore_ascii_case("application/json") {
            Kind::Json
        } else if essence.eq_ignore_ascii_case("text/event-stream") {
            Kind::Events
        } else {
            Kind::Other(essence.to_owned())
        }
    }
}

fn lost(why: String) -> End {
    End::Lost { was_sent: true, why }
}

pub(super) fn too_long(name: &str) -> String {
    format!("{name} sent a message of more than {} MiB", LINE_MAX >> 20)
}

/// One message of a server.
pub(super) struct Piece {
    pub(super) message: Bytes,
    /// The id of the request that it answers.
    pub(super) answers: Option<Id>,
    /// Of a long message.
    pub(super) walk: Option<Box<Walk>>,
}

/// Each message of a text. A batch is split. A long text is parsed on another thread.
pub(super) async fn pieces(text: &Bytes) -> Result<Vec<Piece>, String> {
    if text.len() > PARSED_AT_ONCE_MAX {
        let long = text.clone();
        if let Ok(pieces) = compute_for_server(move || split(&long)).await {
            return pieces;
        }
    }
    split(text)
}

fn split(text: &Bytes) -> Result<Vec<Piece>, String> {
    let piece = |message: Bytes, answers: Option<Id>| {
        let walk = (message.len() > PARSED_AT_ONCE_MAX).then(|| Box::new(Walk::of(&message)));
        Piece { message, answers, walk }
    };
    let answers = |message: &Message<'_>| match message {
        Message::Response { id, .. } => id.parse(),
        _ => None,
    };
    match message::parse(text).map_err(|error| error.why)? {
        Message::Batch(members) => members
            .into_iter()
            .map(|member| {
                let part = text.slice(message::place(text, member));
                let id = answers(&message::parse(&part).map_err(|error| error.why)?);
                Ok(piece(if id.is_some() { with_version(&part) } else { part }, id))
            })
            .collect(),
        single => {
            let id = answers(&single);
            Ok(vec![piece(if id.is_some() { with_version(text) } else { text.clone() }, id)])
        }
    }
}

/// A response unchanged, or with the member `jsonrpc` added if it is missing: clients may refuse it without.
fn with_version(response: &Bytes) -> Bytes {
    const MEMBER: &[u8] = br#""jsonrpc":"2.0""#;
    /// Room for an id of ours after it.
    const NEAR: usize = 64;
    let text = response.trim_ascii();
    // Most responses have the member first, or last before their id, so that the payload need not be parsed. If no
    // bracket but the last one follows it, it is a top-level member.
    let end = &text[text.len().saturating_sub(NEAR)..text.len().saturating_sub(1)];
    let is_first = text.strip_prefix(b"{").is_some_and(|rest| rest.starts_with(MEMBER));
    let is_last =
        || memchr::memmem::rfind(end, MEMBER).is_some_and(|at| !end[at..].iter().any(|byte| b"{}[]".contains(byte)));
    if is_first || is_last() || message::has_version(text) {
        return response.clone();
    }
    let rest = text.strip_prefix(b"{").unwrap_or(text);
    [br#"{"jsonrpc":"2.0","#, rest].concat().into()
}

/// The revision in the answer to `initialize`.
fn negotiated(answer: &Message<'_>) -> Option<HeaderValue> {
    let Message::Response { result: Some(result), .. } = answer else { return None };
    HeaderValue::try_from(message::pick(*result, ["protocolVersion"])?[0].and_then(Raw::text)?).ok()
}

/// A whole body, if it is within the limit.
async fn collect(response: Response<Incoming>, max: usize) -> Result<Bytes, String> {
    let mut body = response.into_body();
    let mut whole = Bytes::new();
    let mut joined = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| format!("broke off its answer: {}", cause(&error)))?;
        let Ok(chunk) = frame.into_data() else { continue };
        if whole.len() + joined.len() + chunk.len() > max {
            return Err(format!("sent a message of more than {} MiB", max >> 20));
        }
        // Most answers arrive in one chunk, which is not copied.
        if whole.is_empty() && joined.is_empty() {
            whole = chunk;
            continue;
        }
        if joined.is_empty() {
            joined.extend_from_slice(&std::mem::take(&mut whole));
        }
        joined.extend_from_slice(&chunk);
    }
    Ok(if joined.is_empty() { whole } else { joined.freeze() })
}

/// How often a request is repeated, and after which pauses.
#[derive(Debug)]
pub(super) struct Tries {
    made: u32,
    max: u32,
    first: Duration,
    longest: Duration,
}

impl Tries {
    pub(super) fn new(limits: &WaitLimits) -> Tries {
        Tries { made: 0, max: limits.tries, first: limits.retry_first, longest: limits.retry_longest }
    }

    /// After a success the count starts again.
    pub(super) fn succeed(&mut self) {
        self.made = 0;
    }

    /// `None` if there were enough attempts. Up to half of the pause is added at random, so that many clients do not
    /// reconnect at once.
    pub(super) fn next(&mut self, asked_for: Option<Duration>) -> Option<Duration> {
        if self.made >= self.max {
            return None;
        }
        let doubled = self.first * (1 << self.made.min(10));
        self.made += 1;
        let delay = asked_for.unwrap_or(doubled);
        // A server that asks for a longer pause than the limit has refused.
        if delay > self.longest {
            return None;
        }
        Some(delay + delay.mul_f64((home::random() % 1000) as f64 / 2000.0))
    }
}
