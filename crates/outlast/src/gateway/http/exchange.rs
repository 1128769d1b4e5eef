//! One message posted, and all that is said in answer to it.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Method, Response, StatusCode, Uri,
    body::Incoming,
    header::{ACCEPT, CONTENT_TYPE, DATE, HeaderValue, RETRY_AFTER},
};
use outlast_core::{
    json::Raw,
    message::{self, Id, Message},
};
use tokio::{
    sync::mpsc::Sender,
    time::{Instant, sleep, timeout, timeout_at},
};

use super::{
    End, News, Patience,
    client::{Failed, Target, cause},
    events::{Event, Events},
    headers,
};
use crate::{home, lines::LINE_MAX};

/// How much is read of the words of a refusal.
const REFUSAL_MAX: usize = 64 << 10;
/// How much of them is repeated.
const EXCERPT_MAX: usize = 300;

pub(super) struct Exchange {
    pub(super) key: u64,
    pub(super) target: Arc<Target>,
    pub(super) url: Uri,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    /// Nothing: a notification or an answer, which nobody answers.
    pub(super) asks: Option<Id>,
    pub(super) is_initialize: bool,
    /// Asked twice it does no more than asked once.
    pub(super) is_safe: bool,
    /// Answers come on another stream, and all there is to hear here is whether it was taken.
    pub(super) is_apart: bool,
    /// A stream that breaks can be gone on with.
    pub(super) is_resumable: bool,
    pub(super) patience: Patience,
    pub(super) news: Sender<News>,
}

impl Exchange {
    pub(super) async fn run(self) {
        let end = self.carry().await;
        // Nobody listens to a link that was dropped.
        let _ = self.news.send(News::Ended { key: self.key, end }).await;
    }

    async fn carry(&self) -> End {
        let mut tries = Tries::new(&self.patience);
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
            let status = response.status();
            if self.is_safe
                && matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
                && let Some(delay) = tries.next(retry_after(response.headers()))
            {
                sleep(delay).await;
                continue;
            }
            return if status.is_success() { self.hear(response).await } else { self.hear_refusal(response).await };
        }
    }

    /// How long a call takes is not ours to limit: a server that answers in JSON says nothing before it is done. What is
    /// quick by nature should not be waited for like that.
    async fn ask(&self) -> Result<Response<Incoming>, Failed> {
        let asking = self.target.ask(&Method::POST, &self.url, &self.headers, &self.body);
        if self.asks.is_some() && !self.is_safe {
            return asking.await;
        }
        let max = self.patience.first_byte;
        timeout(max, asking).await.unwrap_or_else(|_| {
            let why = format!("{} said nothing for {} s", self.target.name(), max.as_secs_f32());
            Err(Failed { was_sent: true, is_unreachable: false, why })
        })
    }

    async fn hear(&self, response: Response<Incoming>) -> End {
        match (Kind::of(&response), self.asks.as_ref().filter(|_| !self.is_apart)) {
            (Kind::Events, _) if !self.is_apart => self.hear_events(response).await,
            (_, None) => {
                // Read to its end, a connection can be used again.
                let _ = timeout(self.patience.linger, collect(response, REFUSAL_MAX)).await;
                End::Taken
            }
            (Kind::Json, Some(_)) => self.hear_json(response).await,
            (Kind::Other(kind), Some(_)) if response.status() == StatusCode::OK => {
                lost(format!("{} answered with `{kind}`, which is neither JSON nor events", self.target.name()))
            }
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
            Ok(false) => lost(format!("{} answered, but not this request", self.target.name())),
            Err(error) => lost(format!("{} answered with what is not JSON: {error}", self.target.name())),
        }
    }

    async fn hear_events(&self, response: Response<Incoming>) -> End {
        let session = response.headers().get(headers::SESSION).cloned();
        let mut events = Events::new(LINE_MAX);
        let mut response = response;
        let mut tries = Tries::new(&self.patience);
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
                    Ok(response) if response.status() == StatusCode::NOT_FOUND => return End::Forgotten,
                    Ok(response) if response.status().is_client_error() => return lost(broke),
                    Ok(_) | Err(_) => {}
                }
            };
            events.begin_again();
        }
    }

    /// Reads one stream to its end. Once the answer is there the rest is waited for only briefly.
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
                until = Some(Instant::now() + self.patience.linger);
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

    /// Passes on what was said, each message by itself. True: our answer was among it.
    async fn say(&self, text: Bytes, session: Option<HeaderValue>) -> Result<bool, String> {
        let heard = pieces(&text)?;
        let mut is_ours = false;
        for (message, answers) in heard {
            let is_answer = answers.is_some() && answers == self.asks;
            if is_answer && self.is_initialize {
                let version = negotiated(&message);
                let _ = self.news.send(News::Opened { session: session.clone(), version }).await;
            }
            is_ours |= is_answer;
            let within = if answers.is_none() { self.asks.clone() } else { None };
            let _ = self.news.send(News::Said { message, answers, within }).await;
        }
        Ok(is_ours)
    }

    async fn note(&self, what: String) {
        let _ = self.news.send(News::Note(format!("{}: {what}", self.target.name()))).await;
    }

    /// An answer that says no. A refusal in words of the protocol is an answer like any other; one in words of HTTP
    /// becomes one, as the server is known not to have acted on it. A failing server may have acted.
    async fn hear_refusal(&self, response: Response<Incoming>) -> End {
        let status = response.status();
        let had_session = self.headers.contains_key(headers::SESSION);
        let is_json = matches!(Kind::of(&response), Kind::Json);
        let body = match timeout(self.patience.first_byte, collect(response, REFUSAL_MAX)).await {
            Ok(Ok(body)) => body,
            Ok(Err(_)) | Err(_) => Bytes::new(),
        };
        let refusal = if is_json { Refusal::read(&body) } else { None };
        if let (Some(refusal), Some(id)) = (&refusal, &self.asks)
            && refusal.id.as_ref() == Some(id)
        {
            let said = News::Said { message: body.clone(), answers: self.asks.clone(), within: None };
            let _ = self.news.send(said).await;
            return End::Answered;
        }
        let speaks_of_session = || String::from_utf8_lossy(&body).to_ascii_lowercase().contains("session");
        if had_session && (status == StatusCode::NOT_FOUND || status == StatusCode::BAD_REQUEST && speaks_of_session())
        {
            return End::Forgotten;
        }
        let words = format!("{} answered {}", self.target.name(), worded(status));
        let Some(id) = &self.asks else {
            let why = excerpt(&body).map_or_else(|| words.clone(), |excerpt| format!("{words}: {excerpt}"));
            self.note(why).await;
            return End::Taken;
        };
        if status.is_server_error() {
            return lost(excerpt(&body).map_or_else(|| words.clone(), |excerpt| format!("{words}: {excerpt}")));
        }
        let message = match refusal {
            Some(refusal) => message::line(format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{}}}"#, refusal.error)),
            None => {
                let data = excerpt(&body).map(|excerpt| format!(r#"{{"body":{}}}"#, message::quote(&excerpt)));
                message::error_line(&id.to_string(), i32::from(status.as_u16()), &words, data.as_deref())
            }
        };
        let _ = self.news.send(News::Said { message, answers: Some(id.clone()), within: None }).await;
        End::Answered
    }
}

enum Drained {
    Ended(String),
    Over(End),
}

/// What an answer says it is.
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

/// An error of the protocol, which a server may say without knowing whom it answers.
struct Refusal {
    id: Option<Id>,
    error: String,
}

impl Refusal {
    fn read(body: &[u8]) -> Option<Refusal> {
        match message::parse(body).ok()? {
            Message::Response { id, error: Some(error), .. } => {
                Some(Refusal { id: id.parse(), error: error.get().replace(['\n', '\r'], " ") })
            }
            _ => None,
        }
    }
}

fn lost(why: String) -> End {
    End::Lost { was_sent: true, why }
}

pub(super) fn too_long(name: &str) -> String {
    format!("{name} says more than {} MiB at once", LINE_MAX >> 20)
}

/// Each message of a text by itself, with the id it answers. A batch is taken apart.
pub(super) fn pieces(text: &Bytes) -> Result<Vec<(Bytes, Option<Id>)>, String> {
    let answers = |message: &Message<'_>| match message {
        Message::Response { id, .. } => id.parse(),
        _ => None,
    };
    match message::parse(text).map_err(|error| error.why)? {
        Message::Batch(members) => members
            .into_iter()
            .map(|member| {
                let piece = text.slice(message::place(text, member));
                let id = answers(&message::parse(&piece).map_err(|error| error.why)?);
                Ok((piece, id))
            })
            .collect(),
        single => Ok(vec![(text.clone(), answers(&single))]),
    }
}

/// The revision in the answer to `initialize`.
fn negotiated(answer: &[u8]) -> Option<HeaderValue> {
    let Ok(Message::Response { result: Some(result), .. }) = message::parse(answer) else { return None };
    HeaderValue::try_from(message::pick(result, ["protocolVersion"])?[0].and_then(Raw::text)?).ok()
}

/// A whole body, if it is not longer than that.
async fn collect(response: Response<Incoming>, max: usize) -> Result<Bytes, String> {
    let mut body = response.into_body();
    let mut whole = Bytes::new();
    let mut joined = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| format!("broke off its answer: {}", cause(&error)))?;
        let Ok(chunk) = frame.into_data() else { continue };
        if whole.len() + joined.len() + chunk.len() > max {
            return Err(format!("says more than {} MiB at once", max >> 20));
        }
        // Most answers come in one piece, which is then not copied.
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

pub(super) fn worded(status: StatusCode) -> String {
    match status.canonical_reason() {
        Some(reason) => format!("{} {reason}", status.as_u16()),
        None => status.as_u16().to_string(),
    }
}

/// The beginning of what it said, on one line.
fn excerpt(body: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(body);
    let words: Vec<&str> = text.split_whitespace().collect();
    let joined: String = words.join(" ").chars().filter(|letter| !letter.is_control()).take(EXCERPT_MAX).collect();
    (!joined.is_empty()).then_some(joined)
}

/// The server's own wish: in seconds, or as a date, which counts from the date of its answer, as clocks differ.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = |name| Some(headers.get(name)?.to_str().ok()?.trim());
    let wish = text(RETRY_AFTER)?;
    if let Ok(seconds) = wish.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let then = httpdate::parse_http_date(wish).ok()?;
    let now = text(DATE).and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or_else(SystemTime::now);
    // One that is past already is a wish for no pause at all.
    Some(then.duration_since(now).unwrap_or_default())
}

/// How often the same is tried again, and after which pauses.
#[derive(Debug)]
pub(super) struct Tries {
    made: u32,
    max: u32,
    first: Duration,
    longest: Duration,
}

impl Tries {
    pub(super) fn new(patience: &Patience) -> Tries {
        Tries { made: 0, max: patience.tries, first: patience.retry_first, longest: patience.retry_longest }
    }

    /// It worked: what comes counts anew.
    pub(super) fn succeed(&mut self) {
        self.made = 0;
    }

    /// Nothing: that was enough. Up to half of the pause is added by chance, so that many do not come back at once.
    pub(super) fn next(&mut self, asked_for: Option<Duration>) -> Option<Duration> {
        if self.made >= self.max {
            return None;
        }
        let doubled = self.first * (1 << self.made.min(10));
        self.made += 1;
        let delay = asked_for.unwrap_or(doubled);
        // A wish for more than we have patience for is a no.
        if delay > self.longest {
            return None;
        }
        Some(delay + delay.mul_f64((home::random() % 1000) as f64 / 2000.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_for_a_pause_is_in_seconds_or_a_date() {
        const DATED: &str = "Fri, 31 Dec 1999 23:59:50 GMT";
        #[rustfmt::skip]
        let table = [
            // retry-after                      date         pause
            (Some("3"),                         None,        Some(3)),
            (Some(" 0 "),                       None,        Some(0)),
            (Some("Fri, 31 Dec 1999 23:59:59 GMT"), Some(DATED), Some(9)),
            (Some("Friday, 31-Dec-99 23:59:52 GMT"), Some(DATED), Some(2)),
            (Some("Fri, 31 Dec 1999 23:59:40 GMT"), Some(DATED), Some(0)),
            // Without a date of theirs ours must do, and that is long past.
            (Some("Fri, 31 Dec 1999 23:59:59 GMT"), None,    Some(0)),
            (Some("soon"),                      Some(DATED), None),
            (Some("-1"),                        None,        None),
            (None,                              Some(DATED), None),
        ];
        for (wish, date, pause) in table {
            let mut headers = HeaderMap::new();
            headers.extend(wish.map(|wish| (RETRY_AFTER, HeaderValue::from_static(wish))));
            headers.extend(date.map(|date| (DATE, HeaderValue::from_static(date))));
            assert_eq!(retry_after(&headers), pause.map(Duration::from_secs), "{wish:?} {date:?}");
        }
    }
}
