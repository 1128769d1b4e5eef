//! One HTTP request: every check before it reaches the machine, and its answer.

use std::{convert::Infallible, future::poll_fn, pin::pin, rc::Rc, time::Instant};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Body as _, Incoming},
    header::{self, HeaderName, HeaderValue},
    http::request::Parts,
};
use outlast_core::{
    gateway::Who,
    message::{self, Id, Message, Outline, Raw, RawId},
};

use super::{
    Door, Refused, agree, cors,
    headers::{Head, session_id, single},
    house::{Exchange, Shared},
    pages,
    session::{NoStream, Session},
    socket::Line,
    stream::{Answer, Body, Content, Place, Reply},
    words,
};

/// Where MCP is spoken.
pub const ENDPOINT: &str = "/mcp";
const SESSION: HeaderName = HeaderName::from_static("mcp-session-id");
/// Room made for a body before any of it is there; the rest is made as it comes.
const BODY_ROOM: usize = 64 << 10;
/// A batch with more members is refused.
const BATCH_MAX: usize = 1000;
/// A body that is of no use is still read if it is no larger.
const SKIP_MAX: u64 = 64 << 10;
/// Letters of a path that stand in the record of a refusal; the rest is cut.
const PATH_MAX: usize = 200;
/// A body may take this much longer for each second's worth of bytes that came.
const BODY_RATE: usize = 64 << 10;

pub async fn serve(door: Rc<Door>, line: Rc<Line>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    line.begin();
    let cors = cors::Cors::of(&door.names.borrow(), &request);
    let about = About::of(&request);
    let answer = match respond(&door, &line, request).await {
        Ok(answer) => answer,
        Err(answer) => {
            door.house.borrow_mut().refused(about.refused(&answer, &line));
            answer
        }
    };
    let mut response = response(*answer, door.house.clone(), line);
    if let Some(cors) = cors {
        cors.put_into(response.headers_mut());
    }
    Ok(response)
}

/// Whether MCP is spoken at this path, with a profile or without.
pub fn is_endpoint(path: &str) -> bool {
    path.strip_prefix(ENDPOINT).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// What is kept of a request for the record of its refusal. A path is copied only where it is not the usual one.
struct About {
    method: Method,
    path: Option<String>,
    session: Option<u32>,
}

impl About {
    fn of(request: &Request<Incoming>) -> About {
        let path = request.uri().path();
        let session = request.headers().get(SESSION).and_then(|value| session_id(value.to_str().ok()?));
        About {
            method: request.method().clone(),
            path: (path != ENDPOINT).then(|| path.chars().take(PATH_MAX).collect()),
            session: session.map(|id| (id >> 96) as u32),
        }
    }

    fn refused(self, answer: &Answer, line: &Line) -> Refused {
        let told = match &answer.content {
            Content::Whole(body) => body.clone(),
            Content::Nothing | Content::Events(..) => Bytes::new(),
        };
        Refused {
            kind: answer.refusal_kind(),
            told,
            method: self.method,
            path: self.path.unwrap_or_else(|| ENDPOINT.to_owned()),
            peer: line.peer().clone(),
            who: line.who(),
            session: self.session,
        }
    }
}

pub type Told = Result<Box<Answer>, Box<Answer>>;

async fn respond(door: &Rc<Door>, line: &Rc<Line>, request: Request<Incoming>) -> Told {
    let (head, body) = request.into_parts();
    let mut body = Some(body);
    let told = route(door, line, head, &mut body).await;
    match (told, body.filter(|body| !body.is_end_stream())) {
        // Refused before its body was read: a small one is read now, so that the connection can go on; with any other it
        // has to end here.
        (Err(mut answer), Some(body)) => {
            let is_small = body.size_hint().upper().is_some_and(|size| size <= SKIP_MAX);
            if !is_small || read(door, body).await.is_err() {
                answer.headers.push(("connection", "close".into()));
            }
            Err(answer)
        }
        (told, _) => told,
    }
}

async fn route(door: &Rc<Door>, line: &Rc<Line>, head: Parts, body: &mut Option<Incoming>) -> Told {
    let authority = head.uri.authority().map(hyper::http::uri::Authority::as_str);
    let found = Head::of(&head.headers);
    if let Err(why) = door.names.borrow().check(&found, authority) {
        return Err(Answer::refusal(StatusCode::FORBIDDEN, why.words()).because(why.kind()));
    }
    if head.method == Method::OPTIONS && is_endpoint(head.uri.path()) && cors::is_preflight(&head.headers) {
        return cors::preflight(&door.names.borrow(), &head.headers);
    }
    let path = head.uri.path();
    let Some(named) =
        path.strip_prefix(ENDPOINT).and_then(|rest| rest.strip_prefix('/').or(rest.is_empty().then_some("")))
    else {
        return pages::turn(door, line, head, body).await;
    };
    let who = identify(door, line, &head.headers)?;
    let who = choose_profile(door, who, named, &found)?;
    match head.method {
        Method::POST => {
            let exchange = post(door, line, who, &found, &head.headers, body).await?;
            // An answer may take long, and all that was read with the head would be held that long.
            drop(head);
            match exchange {
                Some(exchange) => Ok(wait(door, exchange).await),
                None => Ok(Answer::empty(StatusCode::ACCEPTED)),
            }
        }
        Method::GET => get(door, line, who, &found, &head.headers),
        Method::DELETE => delete(door, &who, &found),
        _ => Err(words::method_not_allowed("GET, POST, DELETE", "MCP is spoken by POST, GET and DELETE")),
    }
}

pub fn identify(door: &Door, line: &Line, headers: &HeaderMap) -> Result<Rc<Who>, Box<Answer>> {
    let (who, until) = match &*door.auth.borrow() {
        None => Ok((door.nobody.clone(), None)),
        Some(auth) => auth(headers).map(|found| (Rc::new(found.who), found.until)).map_err(|refused| {
            let answer = Answer::refusal(StatusCode::UNAUTHORIZED, &refused.why);
            answer.with("www-authenticate", refused.challenge)
        }),
    }?;
    line.set_who(&who, door.auth.borrow().is_some(), until);
    Ok(who)
}

/// The client with the profile that it asks for, by the path `/mcp/PROFILE` or by the header `X-Outlast-Profile`. A profile
/// that its credentials give it cannot be exchanged for another.
fn choose_profile(door: &Door, who: Rc<Who>, path: &str, head: &Head<'_>) -> Result<Rc<Who>, Box<Answer>> {
    let in_header = head.profile.text().map_err(|_| {
        Answer::refusal(StatusCode::BAD_REQUEST, "the X-Outlast-Profile header is there twice, or is not text")
    })?;
    let in_path = (!path.is_empty()).then(|| percent_decoded(path));
    let chosen = match (in_path, in_header) {
        (None, None) => return Ok(who),
        (Some(path), Some(header)) if path != header => {
            let message = "the path and the X-Outlast-Profile header name different profiles";
            return Err(Answer::refusal(StatusCode::BAD_REQUEST, message));
        }
        (Some(chosen), _) => chosen,
        (None, Some(chosen)) => chosen.to_owned(),
    };
    match &who.profile {
        Some(given) if *given == chosen => Ok(who),
        Some(_) => {
            let message = "these credentials have a profile of their own, and cannot choose another";
            Err(Answer::refusal(StatusCode::FORBIDDEN, message))
        }
        None if door.profiles.borrow().contains(&chosen) => {
            Ok(Rc::new(Who { profile: Some(chosen), ..(*who).clone() }))
        }
        None => {
            let message = format!("there is no profile `{}`", chosen.chars().take(100).collect::<String>());
            Err(Answer::refusal(StatusCode::NOT_FOUND, &message))
        }
    }
}

/// `%41` is `A`; what is no such escape stays as it is.
fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = bytes.get(at + 1..at + 3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.filter(|_| bytes[at] == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                decoded.push(byte);
                at += 3;
            }
            None => {
                decoded.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// The protocol version in the header, if it stands there once.
fn version<'a>(head: &Head<'a>) -> Result<Option<&'a str>, Box<Answer>> {
    head.version.text().map_err(|_| words::mismatch("null", "the MCP-Protocol-Version header stands there twice"))
}

/// The session that a request of the handshake era says it belongs to.
fn session_named(head: &Head<'_>, version: Option<&str>) -> Result<u128, Box<Answer>> {
    match version {
        Some(version) if !words::HANDSHAKE.contains(&version) => {
            let supported = [&words::STATELESS[..], &words::HANDSHAKE[..]].concat();
            return Err(words::unsupported("null", version, &supported));
        }
        _ => {}
    }
    let id = head.session.text().map_err(|_| words::no_such_session())?;
    let id = id.ok_or_else(words::session_needed)?;
    session_id(id).ok_or_else(words::no_such_session)
}

/// The same, and it is there.
fn session(door: &Door, who: &Who, head: &Head<'_>, version: Option<&str>) -> Result<u128, Box<Answer>> {
    let id = session_named(head, version)?;
    let mut house = door.house.borrow_mut();
    house.session(id, who, Instant::now()).map(|_| id).ok_or_else(words::no_such_session)
}

fn get(door: &Door, line: &Rc<Line>, who: Rc<Who>, head: &Head<'_>, headers: &HeaderMap) -> Told {
    let version = only_with_sessions(head)?;
    if !head.accepts().1 {
        return Err(Answer::refusal(StatusCode::NOT_ACCEPTABLE, "a GET is answered by text/event-stream alone"));
    }
    let id = session(door, &who, head, version)?;
    let last = single(headers, "last-event-id").map_err(|_| lost_stream(NoStream::NotAnId))?;
    let mut house = door.house.borrow_mut();
    let (stream, place) = house.listen(id, last, line.clone(), Instant::now()).map_err(lost_stream)?;
    line.show_pass(head.credentials(headers), who);
    Ok(Answer::events(None, stream, place))
}

fn lost_stream(why: NoStream) -> Box<Answer> {
    let message = match why {
        NoStream::NotAnId => "the Last-Event-ID is none that was given out here",
        NoStream::Forgotten => "the stream with that Last-Event-ID is over, and its events are kept no longer",
    };
    Answer::refusal(StatusCode::BAD_REQUEST, message)
}

fn delete(door: &Door, who: &Who, head: &Head<'_>) -> Told {
    let version = only_with_sessions(head)?;
    let id = session(door, who, head, version)?;
    door.house.borrow_mut().end_session(id);
    Ok(Answer::empty(StatusCode::OK))
}

/// The protocol version of a request that belongs to a session.
fn only_with_sessions<'a>(head: &Head<'a>) -> Result<Option<&'a str>, Box<Answer>> {
    match version(head)? {
        Some(version) if words::is_stateless(version) => {
            Err(words::method_not_allowed("POST", "there are no sessions in this revision, only POST"))
        }
        version => Ok(version),
    }
}

/// A message, and where its answer is to be waited for if it needs one.
async fn post(
    door: &Rc<Door>,
    line: &Rc<Line>,
    who: Rc<Who>,
    head: &Head<'_>,
    headers: &HeaderMap,
    body: &mut Option<Incoming>,
) -> Result<Option<Exchange>, Box<Answer>> {
    if !head.is_json() {
        let message = "the body must be application/json, and not packed";
        return Err(Answer::refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    if head.accepts() != (true, true) {
        let message = "Accept must name both application/json and text/event-stream";
        return Err(Answer::refusal(StatusCode::NOT_ACCEPTABLE, message));
    }
    let body = take(door, body).await?;
    let exchange = said(door, line, &who, head, headers, body)?;
    if let Some(exchange) = &exchange {
        let pass = line.show_pass(head.credentials(headers), who);
        door.house.borrow_mut().allow(exchange.place, pass);
    }
    Ok(exchange)
}

/// Hands a body on. What needs no answer leaves nothing to wait for.
fn said(
    door: &Door,
    line: &Rc<Line>,
    who: &Rc<Who>,
    head: &Head<'_>,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Option<Exchange>, Box<Answer>> {
    let now = Instant::now();
    let message = message::parse(&body)
        .map_err(|unreadable| Answer::json(StatusCode::BAD_REQUEST, None, unreadable.refusal()))?;
    let version = version(head)?;
    let is_stateless = version.is_some_and(words::is_stateless);
    let outline = Outline::of(&body, &message);
    match message {
        Message::Request { id, method, params }
            if agree::claims(&params) || (is_stateless && method != "initialize") =>
        {
            let id = known(id)?;
            agree::check(headers, &id.to_string(), &method, &params, &door.mirrors.borrow())?;
            let info = agree::client_info(&params).map(Raw::get);
            Ok(Some(door.house.borrow_mut().ask_stateless(who, info, body.clone(), outline, line.clone(), now)))
        }
        Message::Request { id, method, .. } if method == "initialize" && head.session.is_absent() => {
            let id = known(id)?;
            if is_stateless {
                let message = "initialize belongs to revisions before the one in the MCP-Protocol-Version header";
                return Err(words::mismatch(&id.to_string(), message));
            }
            door.house.borrow_mut().open_session(who.clone(), id, body, line.clone(), now).map(Some)
        }
        // Nothing that a client could notify us of has a meaning by itself.
        Message::Notification { params, .. } if is_stateless || agree::claims(&params) => Ok(None),
        Message::Response { .. } | Message::Batch(_) | Message::Other if is_stateless => {
            Err(invalid("in this revision a POST is one request or one notification"))
        }
        Message::Other => Err(invalid("the body is no JSON-RPC message")),
        Message::Request { id, .. } => {
            let session = session_named(head, version)?;
            let mut house = door.house.borrow_mut();
            let found = house.session(session, who, now).ok_or_else(words::no_such_session)?;
            let id = known(id)?;
            fresh(found, std::slice::from_ref(&id))?;
            Ok(house.ask(session, id, body, outline, line.clone(), now))
        }
        Message::Notification { .. } | Message::Response { .. } => {
            let session = session(door, who, head, version)?;
            door.house.borrow_mut().note(session, vec![body], now);
            Ok(None)
        }
        Message::Batch(members) => {
            let session = session_named(head, version)?;
            let mut house = door.house.borrow_mut();
            let found = house.session(session, who, now).ok_or_else(words::no_such_session)?;
            let (ids, messages) = batch(found, &body, &members)?;
            if ids.is_empty() {
                house.note(session, messages, now);
                return Ok(None);
            }
            Ok(house.ask_batch(session, ids, messages, line.clone(), now))
        }
    }
}

fn invalid(message: &str) -> Box<Answer> {
    Answer::error(StatusCode::BAD_REQUEST, "null", words::INVALID_REQUEST, message, None)
}

fn known(id: RawId<'_>) -> Result<Id, Box<Answer>> {
    id.parse().ok_or_else(|| invalid("the id of a request must be a string or an integer"))
}

/// Each answer must find its one request.
fn fresh(session: &Session, ids: &[Id]) -> Result<(), Box<Answer>> {
    for (at, id) in ids.iter().enumerate() {
        if session.has(id) || ids[..at].contains(id) {
            let message = format!("a request with the id {id} is in flight already");
            return Err(Answer::error(
                StatusCode::BAD_REQUEST,
                &id.to_string(),
                words::INVALID_REQUEST,
                &message,
                None,
            ));
        }
    }
    Ok(())
}

/// The parts of a batch, and the ids of its requests.
fn batch(session: &Session, body: &Bytes, members: &[message::Raw<'_>]) -> Result<(Vec<Id>, Vec<Bytes>), Box<Answer>> {
    if session.version != words::WITH_BATCHES {
        let message = format!("revision {} has no batches: send each message by itself", session.version);
        return Err(invalid(&message));
    }
    if members.is_empty() {
        return Err(invalid("the batch is empty"));
    }
    if members.len() > BATCH_MAX {
        return Err(invalid(&format!("the batch has more than {BATCH_MAX} members")));
    }
    let (mut ids, mut messages) = (Vec::new(), Vec::with_capacity(members.len()));
    for member in members {
        match message::parse(member.get().as_bytes()) {
            Ok(Message::Request { method, .. }) if method == "initialize" => {
                return Err(invalid("initialize must not be part of a batch"));
            }
            Ok(Message::Request { id, .. }) => ids.push(known(id)?),
            Ok(Message::Notification { .. } | Message::Response { .. }) => {}
            _ => return Err(invalid("a member of the batch is no JSON-RPC message")),
        }
        messages.push(body.slice(message::place(body, *member)));
    }
    fresh(session, &ids)?;
    Ok((ids, messages))
}

pub async fn take(door: &Door, body: &mut Option<Incoming>) -> Result<Bytes, Box<Answer>> {
    match body.take() {
        Some(body) => read(door, body).await,
        None => Ok(Bytes::new()),
    }
}

/// The whole body, or why there is none. A body that came together with its head is not copied.
async fn read(door: &Door, body: Incoming) -> Result<Bytes, Box<Answer>> {
    let (body_max, timeout) = {
        let house = door.house.borrow();
        (house.limits.body_max, house.limits.body_timeout)
    };
    let too_large = || {
        let message = format!("the body is larger than {body_max} bytes");
        Answer::refusal(StatusCode::PAYLOAD_TOO_LARGE, &message).with("connection", "close")
    };
    // Refused before any of it is read, let alone kept.
    if body.size_hint().lower() > body_max as u64 {
        return Err(too_large());
    }
    let announced = body.size_hint().exact();
    let mut body = pin!(body);
    let mut held = Held { house: &door.house, bytes: 0 };
    let mut first = Bytes::new();
    let mut whole = BytesMut::new();
    let mut deadline = None;
    loop {
        let next = match deadline {
            None => {
                // Mostly all of it is there already, and no clock is needed.
                let mut frame = body.frame();
                match poll_fn(|cx| std::task::Poll::Ready(pin!(&mut frame).poll(cx))).await {
                    std::task::Poll::Ready(next) => next,
                    std::task::Poll::Pending => {
                        deadline = Some(tokio::time::Instant::now() + timeout);
                        continue;
                    }
                }
            }
            Some(at) => {
                let longer = std::time::Duration::from_secs((held.bytes / BODY_RATE) as u64);
                tokio::time::timeout_at(at + longer, body.frame()).await.map_err(|_| {
                    let message = "the body did not come in time";
                    Answer::refusal(StatusCode::REQUEST_TIMEOUT, message).with("connection", "close")
                })?
            }
        };
        let data = match next {
            None => break,
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => data,
                Err(_) => continue,
            },
            Some(Err(_)) => {
                let message = "the body ended before its end";
                return Err(Answer::refusal(StatusCode::BAD_REQUEST, message).with("connection", "close"));
            }
        };
        if first.len() + whole.len() + data.len() > body_max {
            return Err(too_large());
        }
        if first.is_empty() && whole.is_empty() && announced == Some(data.len() as u64) {
            first = data;
            continue;
        }
        held.take(data.len())?;
        if whole.is_empty() {
            let room = announced.and_then(|announced| usize::try_from(announced).ok()).unwrap_or(0);
            whole.reserve(room.min(BODY_ROOM).max(data.len()));
        }
        whole.extend_from_slice(&data);
    }
    Ok(if whole.is_empty() { first } else { whole.freeze() })
}

/// Bytes that were taken from the common store for bodies, and are given back whatever becomes of the request.
struct Held<'a> {
    house: &'a Shared,
    bytes: usize,
}

impl Held<'_> {
    fn take(&mut self, bytes: usize) -> Result<(), Box<Answer>> {
        let mut house = self.house.borrow_mut();
        if house.bodies + bytes > house.limits.bodies_max {
            let message = "too much is being sent at once: try again later";
            let answer = Answer::refusal(StatusCode::SERVICE_UNAVAILABLE, message);
            return Err(answer.with("retry-after", "1").with("connection", "close"));
        }
        house.bodies += bytes;
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.house.borrow_mut().bodies -= self.bytes;
    }
}

pub async fn wait(door: &Rc<Door>, exchange: Exchange) -> Box<Answer> {
    let mut asker = Asker { house: &door.house, place: Some(exchange.place) };
    let reply: Rc<Reply> = exchange.reply;
    let answer = poll_fn(|cx| reply.poll(cx)).await;
    asker.place = None;
    answer
}

/// If this is dropped with a place in it, whoever asked is gone.
struct Asker<'a> {
    house: &'a Shared,
    place: Option<Place>,
}

impl Drop for Asker<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.house.borrow_mut().asker_left(place, Instant::now());
        }
    }
}

fn response(answer: Answer, house: Shared, line: Rc<Line>) -> Response<Body> {
    let is_empty = matches!(answer.content, Content::Nothing);
    let is_stream = matches!(answer.content, Content::Events(..));
    let mut response = Response::new(Body::new(answer.content, house, line));
    *response.status_mut() = answer.status;
    let headers = response.headers_mut();
    if !is_empty {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(answer.kind));
    }
    if is_stream {
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
        headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    }
    if let Some(session) = answer.session
        && let Ok(value) = HeaderValue::from_str(&format!("{session:032x}"))
    {
        headers.insert(SESSION, value);
    }
    for (name, value) in answer.headers {
        // A value that cannot stand in a header is left out: the words are in the body.
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
    response
}
