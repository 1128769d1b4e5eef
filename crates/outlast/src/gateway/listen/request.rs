//! Handles one HTTP request: all checks before it reaches the state machine, and its answer.

use std::{
    collections::HashSet,
    convert::Infallible,
    future::poll_fn,
    pin::pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Body as _, Incoming},
    header::{self, HeaderName, HeaderValue},
    http::request::Parts,
};
use outlast_core::{
    front::{NoStream, Posted, Session, SessionId, record::Change},
    gateway::{REQUEST_ID_MAX, Who},
    mcp::{self, method, revision},
    message::{self, Id, Message, Outline, PARSED_AT_ONCE_MAX, Raw, RawId, Walk},
};
use outlast_os::offload::compute_for_client;
use percent_encoding::percent_decode_str;

use super::{
    HttpEndpoint, Refused, agree, answers, cors,
    driver::{Exchange, Shared},
    forward::{self, Forward, ServedBy},
    headers::{Head, session_id, single},
    pages,
    socket::Connection,
    stream::{Answer, Body, Content, Owner, Reply},
};

/// The path of the MCP endpoint.
pub(super) const ENDPOINT: &str = "/mcp";
const SESSION: HeaderName = HeaderName::from_static(mcp::header::SESSION_ID);
/// The initial buffer for a body; it grows as data arrives.
const BODY_ROOM: usize = 64 << 10;
/// A batch with more members is refused.
const BATCH_MAX: usize = 1000;
/// The body of a refused request is still read if it is no larger, so that the connection can be reused.
const SKIP_MAX: u64 = 64 << 10;
/// How long a request waits until the sessions of an earlier gateway are loaded.
const LOADING_MAX: Duration = Duration::from_secs(5);
/// Characters of a path in the record of a refusal; the rest is cut.
const PATH_MAX: usize = 200;
/// Bytes that extend the deadline of a body by one second.
const BODY_RATE: usize = 64 << 10;

pub(super) async fn serve(
    endpoint: Rc<HttpEndpoint>,
    connection: Rc<Connection>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    connection.begin();
    if request.body().is_end_stream() {
        connection.has_request();
    }
    let cors = cors::Cors::of(&endpoint.names.borrow(), &request);
    let about = RequestSummary::of(&request);
    let answer = match respond(&endpoint, &connection, request).await {
        Ok(answer) => answer,
        Err(answer) => {
            endpoint.driver.borrow_mut().refused(about.refused(&answer, &connection));
            answer
        }
    };
    let mut response = response(*answer, endpoint.driver.clone(), connection);
    if let Some(cors) = cors {
        cors.put_into(response.headers_mut());
    }
    Ok(response)
}

/// Whether the path is the MCP endpoint, with a profile or without.
pub(super) fn is_endpoint(path: &str) -> bool {
    path.strip_prefix(ENDPOINT).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// What is kept of a request for the record of its refusal. The path is copied only if it is not the usual one.
struct RequestSummary {
    method: Method,
    path: Option<String>,
    session: Option<u32>,
}

impl RequestSummary {
    fn of(request: &Request<Incoming>) -> RequestSummary {
        let path = request.uri().path();
        let session = request.headers().get(SESSION).and_then(|value| session_id(value.to_str().ok()?));
        RequestSummary {
            method: request.method().clone(),
            path: (path != ENDPOINT).then(|| path.chars().take(PATH_MAX).collect()),
            session: session.map(|id| (id >> 96) as u32),
        }
    }

    fn refused(self, answer: &Answer, connection: &Connection) -> Refused {
        let told = match &answer.content {
            Content::Whole(body) => body.clone(),
            Content::Nothing | Content::Events(..) => Bytes::new(),
        };
        Refused {
            kind: answer.refusal_kind(),
            told,
            method: self.method,
            path: self.path.unwrap_or_else(|| ENDPOINT.to_owned()),
            peer: connection.peer().clone(),
            who: connection.who(),
            session: self.session,
        }
    }
}

pub(super) type Told = Result<Box<Answer>, Box<Answer>>;

async fn respond(endpoint: &Rc<HttpEndpoint>, connection: &Rc<Connection>, request: Request<Incoming>) -> Told {
    let (head, body) = request.into_parts();
    let mut body = Some(body);
    let told = route(endpoint, connection, head, &mut body).await;
    match (told, body.filter(|body| !body.is_end_stream())) {
        // Refused before its body was read: a small body is read now, so that the connection can be reused; otherwise
        // the connection is closed.
        (Err(mut answer), Some(body)) => {
            let is_small = body.size_hint().upper().is_some_and(|size| size <= SKIP_MAX);
            if !is_small || read(endpoint, body).await.is_err() {
                answer.headers.push(("connection", "close".into()));
            }
            Err(answer)
        }
        (told, _) => told,
    }
}

async fn route(
    endpoint: &Rc<HttpEndpoint>,
    connection: &Rc<Connection>,
    head: Parts,
    body: &mut Option<Incoming>,
) -> Told {
    let authority = head.uri.authority().map(hyper::http::uri::Authority::as_str);
    let found = Head::of(&head.headers);
    if let Err(why) = endpoint.names.borrow().check(&found, authority) {
        return Err(Answer::refusal(StatusCode::FORBIDDEN, why.words()).because(why.kind()));
    }
    if head.method == Method::OPTIONS && is_endpoint(head.uri.path()) && cors::is_preflight(&head.headers) {
        return cors::preflight(&endpoint.names.borrow(), &head.headers);
    }
    let path = head.uri.path();
    let Some(named) =
        path.strip_prefix(ENDPOINT).and_then(|rest| rest.strip_prefix('/').or(rest.is_empty().then_some("")))
    else {
        return pages::turn(endpoint, connection, head, body).await;
    };
    let who = identify(endpoint, connection, &head.headers)?;
    let who = choose_profile(endpoint, who, named, &found)?;
    if !found.session.is_absent() && endpoint.driver.borrow().is_loading() {
        // After the timeout the session is not found, as if there were no records.
        let _ = tokio::time::timeout(LOADING_MAX, poll_fn(|cx| endpoint.driver.borrow_mut().poll_loaded(cx))).await;
    }
    let mut read = None;
    let replica = endpoint.cluster.borrow().clone();
    if let Some(replica) = replica
        && let Some(id) = found.session.text().ok().flatten().and_then(session_id)
        && [Method::POST, Method::GET, Method::DELETE].contains(&head.method)
        && !version(&found)?.is_some_and(revision::is_stateless)
    {
        if head.method == Method::POST {
            check_post(&found)?;
            read = Some(take(endpoint, connection, body).await?);
        }
        for tried in 0..=forward::PLACES_MAX {
            let home = match forward::place(endpoint, &replica, connection, &who, id).await? {
                ServedBy::Here => break,
                ServedBy::At(_) if tried == forward::PLACES_MAX => return Err(answers::no_home()),
                ServedBy::At(home) => home,
            };
            // From here on the limits of the streams between replicas apply.
            read.iter_mut().for_each(|body| body.reservation = None);
            // Until the answer is sent, the credentials are checked here.
            connection.show_pass(found.credentials(&head.headers), who.clone());
            let (method, headers, who) = (&head.method, &head.headers, &who);
            let request = forward::Request { method, headers, who, body: read.as_ref().map(|body| &body.bytes) };
            match forward::forward(endpoint, &replica, connection, request, id, &home).await {
                Forward::Answered(told) => return told,
                Forward::Again => {}
            }
        }
    }
    match head.method {
        Method::POST => {
            let exchange = post(endpoint, connection, who, &found, &head.headers, read, body).await?;
            // Frees the headers, because the answer may take long.
            drop(head);
            match exchange {
                Some(exchange) => Ok(wait(endpoint, exchange).await),
                None => Ok(Answer::empty(StatusCode::ACCEPTED)),
            }
        }
        Method::GET => get(endpoint, connection, who, &found, &head.headers),
        Method::DELETE => delete(endpoint, connection, &who, &found),
        _ => Err(answers::method_not_allowed("GET, POST, DELETE", "only POST, GET and DELETE are allowed")),
    }
}

pub(super) fn identify(
    endpoint: &HttpEndpoint,
    connection: &Connection,
    headers: &HeaderMap,
) -> Result<Rc<Who>, Box<Answer>> {
    let (who, until) = match &*endpoint.auth.borrow() {
        None => Ok((endpoint.anonymous.clone(), None)),
        Some(auth) => auth(headers).map(|found| (Rc::new(found.who), found.until)).map_err(|refused| {
            let answer = Answer::refusal(StatusCode::UNAUTHORIZED, &refused.why);
            answer.with("www-authenticate", refused.challenge)
        }),
    }?;
    connection.set_who(&who, endpoint.auth.borrow().is_some(), until);
    Ok(who)
}

/// The client with the profile that it requests, by the path `/mcp/PROFILE` or by the header `X-Outlast-Profile`. A
/// profile that comes from its credentials cannot be replaced.
fn choose_profile(endpoint: &HttpEndpoint, who: Rc<Who>, path: &str, head: &Head<'_>) -> Result<Rc<Who>, Box<Answer>> {
    let in_header = head.profile.text().map_err(|_| {
        Answer::refusal(StatusCode::BAD_REQUEST, "the X-Outlast-Profile header is there twice, or is not text")
    })?;
    let in_path = (!path.is_empty()).then(|| percent_decode_str(path).decode_utf8_lossy().into_owned());
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
        None if endpoint.profiles.borrow().contains(&chosen) => {
            Ok(Rc::new(Who { profile: Some(chosen), ..(*who).clone() }))
        }
        None => {
            let message = format!("no profile is named `{}`", chosen.chars().take(100).collect::<String>());
            Err(Answer::refusal(StatusCode::NOT_FOUND, &message))
        }
    }
}

/// The protocol version in the header, which may occur once.
fn version<'a>(head: &Head<'a>) -> Result<Option<&'a str>, Box<Answer>> {
    head.version.text().map_err(|_| answers::mismatch("null", "the MCP-Protocol-Version header is there twice"))
}

/// The session that a request of the handshake era names.
pub(super) fn session_named(head: &Head<'_>, version: Option<&str>) -> Result<SessionId, Box<Answer>> {
    match version {
        Some(version) if !revision::HANDSHAKE.contains(&version) => {
            let supported = [&[revision::STATELESS][..], &revision::HANDSHAKE[..]].concat();
            return Err(answers::unsupported("null", version, &supported));
        }
        _ => {}
    }
    let id = head.session.text().map_err(|_| answers::no_such_session())?;
    let id = id.ok_or_else(answers::session_needed)?;
    session_id(id).ok_or_else(answers::no_such_session)
}

/// The client of the session to which a request belongs.
fn session(
    endpoint: &HttpEndpoint,
    connection: &Connection,
    who: &Who,
    head: &Head<'_>,
    version: Option<&str>,
) -> Result<u64, Box<Answer>> {
    let id = session_named(head, version)?;
    let mut driver = endpoint.driver.borrow_mut();
    driver.restore(id, who, connection, Instant::now());
    driver.session(id, who).map(Session::client).ok_or_else(answers::no_such_session)
}

fn get(
    endpoint: &HttpEndpoint,
    connection: &Rc<Connection>,
    who: Rc<Who>,
    head: &Head<'_>,
    headers: &HeaderMap,
) -> Told {
    let version = only_with_sessions(head)?;
    if !head.accepts().1 {
        return Err(Answer::refusal(
            StatusCode::NOT_ACCEPTABLE,
            "the Accept header of a GET must include text/event-stream",
        ));
    }
    let id = session_named(head, version)?;
    let last = single(headers, "last-event-id").map_err(|_| answers::no_stream(NoStream::NotAnId))?;
    let mut driver = endpoint.driver.borrow_mut();
    let (client, answer) = driver.listen(id, &who, last, connection, Instant::now())?;
    driver.allow_session(client, connection.show_pass(head.credentials(headers), who));
    Ok(answer)
}

pub(super) fn delete(endpoint: &HttpEndpoint, connection: &Connection, who: &Who, head: &Head<'_>) -> Told {
    let version = only_with_sessions(head)?;
    let client = session(endpoint, connection, who, head, version)?;
    endpoint.driver.borrow_mut().end_session(client, Instant::now());
    Ok(Answer::empty(StatusCode::OK))
}

/// The protocol version of a request that needs a session.
fn only_with_sessions<'a>(head: &Head<'a>) -> Result<Option<&'a str>, Box<Answer>> {
    match version(head)? {
        Some(version) if revision::is_stateless(version) => {
            Err(answers::method_not_allowed("POST", "this revision has no sessions: only POST is allowed"))
        }
        version => Ok(version),
    }
}

/// What the headers of every POST must say.
fn check_post(head: &Head<'_>) -> Result<(), Box<Answer>> {
    if !head.is_json() {
        let message = "the body must be application/json and not compressed";
        return Err(Answer::refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    if head.accepts() != (true, true) {
        let message = "Accept must name both application/json and text/event-stream";
        return Err(Answer::refusal(StatusCode::NOT_ACCEPTABLE, message));
    }
    Ok(())
}

/// Forwards a message. Returns where to wait for its answer, if it needs one.
async fn post(
    endpoint: &Rc<HttpEndpoint>,
    connection: &Rc<Connection>,
    who: Rc<Who>,
    head: &Head<'_>,
    headers: &HeaderMap,
    read: Option<ReceivedBody>,
    body: &mut Option<Incoming>,
) -> Result<Option<Exchange>, Box<Answer>> {
    check_post(head)?;
    let body = match read {
        Some(body) => body,
        None => take(endpoint, connection, body).await?,
    };
    let exchange = said(endpoint, connection, &who, head, headers, body).await?;
    if let Some(exchange) = &exchange {
        let pass = connection.show_pass(head.credentials(headers), who);
        if let Owner::Client(client) = exchange.owner {
            let mut driver = endpoint.driver.borrow_mut();
            match exchange.is_session {
                true => driver.allow_session(client, pass),
                false => driver.allow_request(client, &pass),
            }
        }
    }
    Ok(exchange)
}

/// Forwards a body. Returns `None` if it needs no answer. A long body is parsed on another thread.
pub(super) async fn said(
    endpoint: &HttpEndpoint,
    connection: &Rc<Connection>,
    who: &Rc<Who>,
    head: &Head<'_>,
    headers: &HeaderMap,
    body: ReceivedBody,
) -> Result<Option<Exchange>, Box<Answer>> {
    let is_long = body.bytes.len() > PARSED_AT_ONCE_MAX;
    let _turn = match head.session.text().ok().flatten().and_then(session_id) {
        Some(session) => endpoint.order.turn(session, is_long).await,
        None => None,
    };
    let walk = if is_long { Some(parse_beside(&body).await?) } else { None };
    // Until the machine has the message, its bytes are reserved.
    let ReceivedBody { bytes: body, reservation: _reservation } = body;
    let now = Instant::now();
    let message = walk
        .as_ref()
        .map_or_else(|| message::parse(&body), |walk| walk.read(&body))
        .map_err(|unreadable| Answer::json(StatusCode::BAD_REQUEST, None, unreadable.refusal()))?;
    if is_long {
        check_long(&message)?;
    }
    let version = version(head)?;
    let is_stateless = version.is_some_and(revision::is_stateless);
    let outline = Outline::of(&body, &message);
    match message {
        Message::Request { id, method, params }
            if agree::claims(&params) || (is_stateless && method != method::INITIALIZE) =>
        {
            let id = known(id)?;
            agree::check(headers, &id.to_string(), &method, &params, &endpoint.mirrors.borrow())?;
            let info = agree::client_info(&params).map(Raw::get);
            Ok(Some(endpoint.driver.borrow_mut().request(who, info, body.clone(), outline, connection, now)))
        }
        Message::Request { id, method, .. } if method == method::INITIALIZE && head.session.is_absent() => {
            let id = known(id)?;
            if is_stateless {
                let message = "initialize belongs to revisions before the one in the MCP-Protocol-Version header";
                return Err(answers::mismatch(&id.to_string(), message));
            }
            endpoint.driver.borrow_mut().open_session(who, id, body, connection, now).map(Some)
        }
        // In the stateless era, notifications of clients have no effect.
        Message::Notification { params, .. } if is_stateless || agree::claims(&params) => Ok(None),
        Message::Response { .. } | Message::Batch(_) | Message::Other if is_stateless => {
            Err(invalid("in this revision a POST is one request or one notification"))
        }
        Message::Other => Err(invalid("the body is not a JSON-RPC message")),
        Message::Request { id, method, params } => {
            let session = session_named(head, version)?;
            let mut driver = endpoint.driver.borrow_mut();
            driver.restore(session, who, connection, now);
            let found = driver.session(session, who).ok_or_else(answers::no_such_session)?;
            let (client, id) = (found.client(), known(id)?);
            fresh(found, std::slice::from_ref(&id))?;
            let change = Change::of(&method, &params);
            let requests = Posted::One { id, message: body, outline, change };
            Ok(Some(driver.post(client, requests, connection, now)))
        }
        Message::Notification { .. } | Message::Response { .. } => {
            let client = session(endpoint, connection, who, head, version)?;
            let mut driver = endpoint.driver.borrow_mut();
            match walk {
                Some(walk) => driver.note_long(client, body, Box::new(walk), now),
                None => driver.note(client, vec![body], now),
            }
            Ok(None)
        }
        Message::Batch(members) => {
            let session = session_named(head, version)?;
            let mut driver = endpoint.driver.borrow_mut();
            driver.restore(session, who, connection, now);
            let found = driver.session(session, who).ok_or_else(answers::no_such_session)?;
            let client = found.client();
            let Batch { ids, messages, changes } = batch(found, &body, &members)?;
            if ids.is_empty() {
                driver.note(client, messages, now);
                return Ok(None);
            }
            Ok(Some(driver.post(client, Posted::Batch { ids, messages, changes }, connection, now)))
        }
    }
}

/// Parses a long body on another thread. Its bytes stay reserved there if the client leaves.
async fn parse_beside(body: &ReceivedBody) -> Result<Walk, Box<Answer>> {
    let body = body.clone();
    let parsing = compute_for_client(move || Walk::of(&body.bytes));
    parsing.await.map_err(|_| busy("too many long messages are being parsed: try again later"))
}

fn busy(message: &str) -> Box<Answer> {
    Answer::refusal(StatusCode::SERVICE_UNAVAILABLE, message).with("retry-after", "1")
}

/// Long messages of these kinds would be parsed again on the event loop. Requests and responses are not.
fn check_long(message: &Message<'_>) -> Result<(), Box<Answer>> {
    let (what, id) = match message {
        Message::Request { id, method, .. } if method == method::INITIALIZE => {
            ("an initialize request", known(*id)?.to_string())
        }
        Message::Notification { .. } => ("a notification", "null".into()),
        Message::Batch(_) => ("a batch", "null".into()),
        _ => return Ok(()),
    };
    let message = format!("{what} may have at most {} MiB", PARSED_AT_ONCE_MAX >> 20);
    Err(Answer::error(StatusCode::PAYLOAD_TOO_LARGE, &id, answers::INVALID_REQUEST, &message, None))
}

fn invalid(message: &str) -> Box<Answer> {
    Answer::error(StatusCode::BAD_REQUEST, "null", answers::INVALID_REQUEST, message, None)
}

fn known(id: RawId<'_>) -> Result<Id, Box<Answer>> {
    let id = id.parse().ok_or_else(|| invalid("the id of a request must be a string or an integer"))?;
    if id.size() > REQUEST_ID_MAX {
        let message = format!("the id of a request may have at most {REQUEST_ID_MAX} bytes");
        return Err(Answer::error(StatusCode::BAD_REQUEST, &id.to_string(), answers::INVALID_REQUEST, &message, None));
    }
    Ok(id)
}

/// Ids must be unique, so that each answer matches one request.
fn fresh(session: &Session<Reply>, ids: &[Id]) -> Result<(), Box<Answer>> {
    let mut seen = HashSet::new();
    for id in ids {
        if session.has(id) || !seen.insert(id) {
            let message = format!("a request with the id {id} is already in flight");
            return Err(Answer::error(
                StatusCode::BAD_REQUEST,
                &id.to_string(),
                answers::INVALID_REQUEST,
                &message,
                None,
            ));
        }
    }
    Ok(())
}

/// The members of a batch.
struct Batch {
    ids: Vec<Id>,
    messages: Vec<Bytes>,
    changes: Vec<(Id, Change)>,
}

/// The parts of a batch, and the ids of its requests.
fn batch(session: &Session<Reply>, body: &Bytes, members: &[message::Raw<'_>]) -> Result<Batch, Box<Answer>> {
    if session.version() != revision::WITH_BATCHES {
        let message = format!("revision {} has no batches: send each message by itself", session.version());
        return Err(invalid(&message));
    }
    if members.is_empty() {
        return Err(invalid("the batch is empty"));
    }
    if members.len() > BATCH_MAX {
        return Err(invalid(&format!("the batch has more than {BATCH_MAX} members")));
    }
    let (mut ids, mut messages, mut changes) = (Vec::new(), Vec::with_capacity(members.len()), Vec::new());
    for member in members {
        match message::parse_again(member.get().as_bytes()) {
            Ok(Message::Request { method, .. }) if method == method::INITIALIZE => {
                return Err(invalid("initialize must not be part of a batch"));
            }
            Ok(Message::Request { id, method, params }) => {
                let id = known(id)?;
                changes.extend(Change::of(&method, &params).map(|change| (id.clone(), change)));
                ids.push(id);
            }
            Ok(Message::Notification { .. } | Message::Response { .. }) => {}
            _ => return Err(invalid("a member of the batch is not a JSON-RPC message")),
        }
        messages.push(body.slice(message::place(body, *member)));
    }
    fresh(session, &ids)?;
    Ok(Batch { ids, messages, changes })
}

/// A body that was read as a whole.
#[derive(Clone)]
pub(super) struct ReceivedBody {
    pub(super) bytes: Bytes,
    /// Its part of the shared budget. None for a body of another replica.
    reservation: Option<Arc<BodyReservation>>,
}

impl From<Bytes> for ReceivedBody {
    fn from(bytes: Bytes) -> ReceivedBody {
        ReceivedBody { bytes, reservation: None }
    }
}

pub(super) async fn take(
    endpoint: &HttpEndpoint,
    connection: &Connection,
    body: &mut Option<Incoming>,
) -> Result<ReceivedBody, Box<Answer>> {
    let Some(body) = body.take() else { return Ok(Bytes::new().into()) };
    let body = read(endpoint, body).await?;
    connection.has_request();
    Ok(body)
}

/// The whole body, or an error answer. A body that arrived together with its head is not copied.
async fn read(endpoint: &HttpEndpoint, body: Incoming) -> Result<ReceivedBody, Box<Answer>> {
    let (body_max, timeout, mut held) = {
        let driver = endpoint.driver.borrow();
        let limits = driver.limits();
        let held = BodyReservation { of_all: driver.bodies().clone(), bytes: 0, bytes_max: limits.bodies_max };
        (limits.body_max, limits.body_timeout, held)
    };
    let too_large = || {
        let message = format!("the body is larger than {body_max} bytes");
        Answer::refusal(StatusCode::PAYLOAD_TOO_LARGE, &message).with("connection", "close")
    };
    // Refused before any of it is read.
    if body.size_hint().lower() > body_max as u64 {
        return Err(too_large());
    }
    let announced = body.size_hint().exact();
    let mut body = pin!(body);
    let mut first = Bytes::new();
    let mut whole = BytesMut::new();
    let mut deadline = None;
    loop {
        let next = match deadline {
            None => {
                // Usually the whole body has arrived already, and no timeout is needed.
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
                    let message = "the body did not arrive in time";
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
                let message = "the body is shorter than its Content-Length";
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
    let bytes = if whole.is_empty() { first } else { whole.freeze() };
    Ok(ReceivedBody { bytes, reservation: Some(Arc::new(held)) })
}

/// Bytes reserved from the shared budget for bodies; released on drop.
struct BodyReservation {
    of_all: Arc<AtomicUsize>,
    bytes: usize,
    /// Of all bodies together.
    bytes_max: usize,
}

impl BodyReservation {
    fn take(&mut self, bytes: usize) -> Result<(), Box<Answer>> {
        self.bytes += bytes;
        if self.of_all.fetch_add(bytes, Ordering::Relaxed) + bytes > self.bytes_max {
            let answer = busy("too many bytes are being received: try again later");
            return Err(answer.with("connection", "close"));
        }
        Ok(())
    }
}

impl Drop for BodyReservation {
    fn drop(&mut self) {
        self.of_all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

pub(super) async fn wait(endpoint: &Rc<HttpEndpoint>, exchange: Exchange) -> Box<Answer> {
    let mut asker = Asker { driver: &endpoint.driver, owner: Some(exchange.owner), reply: exchange.reply };
    let answer = poll_fn(|cx| asker.reply.poll(cx)).await;
    asker.owner = None;
    answer
}

/// If it is dropped while it has an owner, it reports that the connection is gone.
struct Asker<'a> {
    driver: &'a Shared,
    owner: Option<Owner>,
    reply: Reply,
}

impl Drop for Asker<'_> {
    fn drop(&mut self) {
        if let Some(owner) = self.owner {
            // Dropped first, because an answer that is a stream refers to its own reply.
            drop(self.reply.take());
            self.driver.borrow_mut().asker_left(owner, &self.reply, Instant::now());
        }
    }
}

pub(super) fn response(answer: Answer, driver: Shared, connection: Rc<Connection>) -> Response<Body> {
    let is_empty = matches!(answer.content, Content::Nothing);
    let is_stream = matches!(answer.content, Content::Events(..));
    let mut response = Response::new(Body::new(answer.content, driver, connection));
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
        // A value that is not valid in a header is left out; the body has the same text.
        if let Ok(value) = HeaderValue::from_str(&value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
    response
}
