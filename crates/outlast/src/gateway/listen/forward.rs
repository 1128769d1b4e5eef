//! Requests of sessions whose home is another replica of the cluster: forwarded there over a stream, and answered from there.
//! Which replica is the home is decided in `core::cluster::homes`.

use std::{
    future::poll_fn,
    rc::Rc,
    task::Poll,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::{Buf, Bytes};
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Method, Response, StatusCode,
    header::{self, HeaderName, HeaderValue},
};
use outlast_core::{
    cluster::{
        homes::{Home, Outcome},
        streams::{End, Stream},
    },
    front::SessionId,
    gateway::Who,
    mcp,
    message::{self, Message, PARSED_AT_ONCE_MAX, RawId, Walk},
};
use outlast_os::offload::compute_for_client;
use serde::{Deserialize, Serialize};
use serde_json::value::to_raw_value;
use tokio::{sync::oneshot, task::spawn_local};

use super::{
    HttpEndpoint, answers,
    headers::{Head, single},
    request::{self, Told, response, said, wait},
    socket::{CloseRequest, Connection},
    stream::{Answer, Body, Owner, Reply},
};
use crate::{
    cluster::replica::{Pipe, PipeEnd, SharedReplica, resolve},
    gateway::session_store::record_key,
};

/// How often a request looks for the home of its session, which may move meanwhile.
pub(super) const PLACES_MAX: usize = 4;
/// The home of a session that another replica took over meanwhile refuses a request with this.
const NOT_HERE: &str = "no_such_session";
/// Headers that the home needs. Credentials are not among them: this replica has checked them.
const FORWARDED: [&str; 5] =
    ["accept", "content-type", mcp::header::PROTOCOL_VERSION, mcp::header::SESSION_ID, "last-event-id"];
/// Headers of an answer that reach the client.
const RETURNED: [&str; 1] = ["retry-after"];

/// A request, as the home gets it. The body follows, if there is one.
#[derive(Debug, Serialize, Deserialize)]
struct ForwardedRequest {
    method: String,
    name: String,
    role: Option<String>,
    profile: Option<String>,
    /// The client proved who it is.
    is_known: bool,
    /// When its credentials expire, in milliseconds since 1970.
    until_ms: Option<u64>,
    peer: String,
    headers: Vec<(String, String)>,
}

/// The answer of the home. The body follows, whole or as events.
#[derive(Debug, Serialize, Deserialize)]
struct ForwardedHead {
    status: u16,
    headers: Vec<(String, String)>,
    body: BodyKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum BodyKind {
    None,
    Whole,
    Events,
}

/// Where a request is served.
pub(super) enum ServedBy {
    Here,
    At(Home),
}

/// What became of a forwarded request.
pub(super) enum Forward {
    Answered(Told),
    /// Nothing of it was carried out, and its home is another one now.
    Again,
}

/// Finds the home of a session, and opens the session here if its home is lost.
pub(super) async fn place(
    endpoint: &HttpEndpoint,
    replica: &SharedReplica,
    connection: &Connection,
    who: &Who,
    id: SessionId,
) -> Result<ServedBy, Box<Answer>> {
    let key = record_key(id);
    let mut outcome = resolve(replica, key, who).await;
    if matches!(outcome, Outcome::Here) && !endpoint.driver.borrow().has_session(id) {
        // The request that was to open it has left, or comes after this one.
        replica.borrow_mut().not_opened(key);
        outcome = resolve(replica, key, who).await;
    }
    match outcome {
        Outcome::Here => Ok(ServedBy::Here),
        Outcome::Restore { record, .. } => {
            let mut driver = endpoint.driver.borrow_mut();
            if driver.session(id, who).is_some() {
                return Ok(ServedBy::Here);
            }
            driver.load(key, *record, Instant::now());
            driver.restore(id, who, connection, Instant::now());
            if driver.session(id, who).is_none() {
                replica.borrow_mut().not_restored(key);
                return Err(answers::no_such_session());
            }
            Ok(ServedBy::Here)
        }
        Outcome::Forward { to } => Ok(ServedBy::At(to)),
        Outcome::NotFound => Err(answers::no_such_session()),
        Outcome::Unavailable => Err(answers::no_home()),
    }
}

/// A request, as far as its forwarding needs it.
pub(super) struct Request<'a> {
    pub method: &'a Method,
    pub headers: &'a HeaderMap,
    pub who: &'a Rc<Who>,
    /// Of a POST.
    pub body: Option<&'a Bytes>,
}

pub(super) async fn forward(
    endpoint: &Rc<HttpEndpoint>,
    replica: &SharedReplica,
    connection: &Rc<Connection>,
    request: Request<'_>,
    id: SessionId,
    home: &Home,
) -> Forward {
    let until_ms = connection.until().and_then(|until| until.duration_since(UNIX_EPOCH).ok());
    let forwarded = ForwardedRequest {
        method: request.method.as_str().to_owned(),
        name: request.who.name.clone(),
        role: request.who.role.clone(),
        profile: request.who.profile.clone(),
        is_known: connection.is_known(),
        until_ms: until_ms.and_then(|until| u64::try_from(until.as_millis()).ok()),
        peer: connection.peer().to_string(),
        headers: chosen(request.headers, &FORWARDED),
    };
    let Ok(forwarded) = to_raw_value(&forwarded) else { return Forward::Answered(Err(answers::no_home())) };
    let pipe = Pipe::open(replica, home.instance, forwarded);
    if let Some(body) = request.body {
        pipe.send(body.clone());
    }
    let head = match pipe.receive().await {
        Ok(head) => head,
        Err(end) => {
            // It is found out whether this replica is alive, and whether it is still the home.
            replica.borrow_mut().home_refused(record_key(id), home);
            let is_untouched = matches!(&end.how, End::Aborted(why) if why == NOT_HERE);
            return match is_untouched || was_not_sent(&end, request.body.is_some()) {
                true => Forward::Again,
                false => Forward::Answered(home_ended(request.body).await),
            };
        }
    };
    let Ok(head) = serde_json::from_slice::<ForwardedHead>(&head) else {
        return Forward::Answered(Err(answers::no_home()));
    };
    let status = StatusCode::from_u16(head.status).unwrap_or(StatusCode::BAD_GATEWAY);
    let mut answer = match head.body {
        BodyKind::None => Answer::empty(status),
        BodyKind::Whole => match pipe.receive().await {
            Ok(body) => Answer::json(status, None, body),
            Err(_) => return Forward::Answered(home_ended(request.body).await),
        },
        BodyKind::Events => events(endpoint, connection, pipe),
    };
    for name in RETURNED {
        if let Some((_, value)) = head.headers.iter().find(|(known, _)| known == name) {
            answer = answer.with(name, value.clone());
        }
    }
    Forward::Answered(if status.is_client_error() || status.is_server_error() { Err(answer) } else { Ok(answer) })
}

/// The events of the home become the response. The stream to the home ends when the client has left.
fn events(endpoint: &Rc<HttpEndpoint>, connection: &Rc<Connection>, pipe: Pipe) -> Box<Answer> {
    let reply = Reply::new(connection.clone());
    let (left, mut has_left) = oneshot::channel::<()>();
    let number = endpoint.driver.borrow_mut().add_forward(left);
    let (sink, bytes_max) = (reply.clone(), endpoint.driver.borrow().limits().stream_bytes_max);
    spawn_local(async move {
        loop {
            let frame = tokio::select! {
                frame = pipe.receive() => frame,
                _ = &mut has_left => return,
            };
            match frame {
                Ok(frame) => sink.send(frame, bytes_max),
                // Also if the home has ended: the client resumes the stream at the next one.
                Err(_) => return sink.end(),
            }
        }
    });
    Answer::events(None, reply, Owner::Forward(number))
}

/// Nothing of the request has reached the home.
fn was_not_sent(end: &PipeEnd, has_body: bool) -> bool {
    !end.is_opened || has_body && !end.unsent.is_empty()
}

/// The answer to a request whose home ended before it answered.
async fn home_ended(body: Option<&Bytes>) -> Told {
    const WORDS: &str =
        "The gateway replica that served this session has ended. This request may or may not have taken effect.";
    const DATA: &str = r#"{"from":"outlast","reason":"gateway_ended","outcome":"unknown"}"#;
    let error = |id: &str| message::error_line(id, 7001, WORDS, Some(DATA));
    let text = |id: RawId<'_>| id.parse().map_or_else(|| "null".to_owned(), |id| id.to_string());
    let Some(body) = body else { return Err(answers::no_home()) };
    let walk = match body.clone() {
        long if long.len() > PARSED_AT_ONCE_MAX => compute_for_client(move || Walk::of(&long)).await.ok(),
        _ => None,
    };
    match walk.as_ref().map_or_else(|| message::parse(body), |walk| walk.read(body)) {
        Ok(Message::Request { id, .. }) => Ok(Answer::json(StatusCode::OK, None, error(&text(id)))),
        Ok(Message::Batch(members)) => {
            let ids = members.iter().filter_map(|member| match message::parse_again(member.get().as_bytes()) {
                Ok(Message::Request { id, .. }) => Some(text(id)),
                _ => None,
            });
            let errors: Vec<Bytes> = ids.map(|id| error(&id)).collect();
            let parts: Vec<&[u8]> = errors.iter().map(|line| line.trim_ascii_end()).collect();
            let body = [b"[" as &[u8], &parts.join(&b","[..]), b"]"].concat();
            Ok(Answer::json(StatusCode::OK, None, body.into()))
        }
        _ => Err(answers::no_home()),
    }
}

fn chosen(headers: &HeaderMap, names: &[&str]) -> Vec<(String, String)> {
    let found = names.iter().filter_map(|name| Some((*name, headers.get(*name)?.to_str().ok()?)));
    found.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Serves a request that another replica forwards.
pub(super) async fn serve(endpoint: Rc<HttpEndpoint>, replica: SharedReplica, stream: Stream, request: Bytes) {
    let pipe = Pipe::accept(&replica, stream);
    let Ok(request) = serde_json::from_slice::<ForwardedRequest>(&request) else {
        return pipe.abort("the request cannot be read");
    };
    let connection = endpoint.driver.borrow().connection_of_replica(request.peer.as_str().into(), Instant::now());
    let told = tokio::select! {
        biased;
        told = respond(&endpoint, &replica, &connection, &pipe, request) => told,
        // Its client has left.
        () = closed(&connection) => return,
    };
    let answer = match told {
        Some(Ok(answer) | Err(answer)) => answer,
        None => return pipe.abort(NOT_HERE),
    };
    send(&connection, pipe, response(*answer, endpoint.driver.clone(), connection.clone())).await;
}

/// None if the session is not open here.
async fn respond(
    endpoint: &Rc<HttpEndpoint>,
    replica: &SharedReplica,
    connection: &Rc<Connection>,
    pipe: &Pipe,
    request: ForwardedRequest,
) -> Option<Told> {
    let mut headers = HeaderMap::new();
    for (name, value) in &request.headers {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::from_str(value)) {
            headers.append(name, value);
        }
    }
    let head = Head::of(&headers);
    let who = Rc::new(Who { name: request.name, role: request.role, profile: request.profile });
    let until = request.until_ms.map(|until| UNIX_EPOCH + Duration::from_millis(until));
    connection.begin();
    connection.set_who(&who, request.is_known, until);
    let id = request::session_named(&head, None).ok()?;
    match place(endpoint, replica, connection, &who, id).await {
        Ok(ServedBy::Here) => {}
        Ok(ServedBy::At(_)) | Err(_) => return None,
    }
    endpoint.driver.borrow().session(id, &who)?;
    Some(match request.method.as_str() {
        "POST" => {
            let body = pipe.receive().await.ok()?;
            posted(endpoint, connection, pipe, &who, &head, &headers, body, until).await?
        }
        "GET" => listen(endpoint, connection, &who, &head, &headers, until),
        _ => request::delete(endpoint, connection, &who, &head),
    })
}

#[expect(clippy::too_many_arguments, reason = "one call, of the parts of one request")]
async fn posted(
    endpoint: &Rc<HttpEndpoint>,
    connection: &Rc<Connection>,
    pipe: &Pipe,
    who: &Rc<Who>,
    head: &Head<'_>,
    headers: &HeaderMap,
    body: Bytes,
    until: Option<SystemTime>,
) -> Option<Told> {
    let exchange = match said(endpoint, connection, who, head, headers, body.into()).await {
        Ok(Some(exchange)) => exchange,
        Ok(None) => return Some(Ok(Answer::empty(StatusCode::ACCEPTED))),
        Err(refused) => return Some(Err(refused)),
    };
    if let Owner::Client(client) = exchange.owner {
        endpoint.driver.borrow_mut().allow_forwarded(client, until);
    }
    tokio::select! {
        biased;
        answer = wait(endpoint, exchange) => Some(Ok(answer)),
        // The client has left, or its replica: what it asked for continues, as after a broken connection.
        _ = pipe.receive() => None,
    }
}

fn listen(
    endpoint: &HttpEndpoint,
    connection: &Rc<Connection>,
    who: &Rc<Who>,
    head: &Head<'_>,
    headers: &HeaderMap,
    until: Option<SystemTime>,
) -> Told {
    let id = request::session_named(head, None)?;
    let last =
        single(headers, "last-event-id").map_err(|_| answers::no_stream(outlast_core::front::NoStream::NotAnId))?;
    let mut driver = endpoint.driver.borrow_mut();
    let (client, answer) = driver.listen(id, who, last, connection, Instant::now())?;
    driver.allow_forwarded(client, until);
    Ok(answer)
}

/// Sends a response to the replica that forwarded its request.
async fn send(connection: &Connection, pipe: Pipe, response: Response<Body>) {
    let (parts, mut body) = response.into_parts();
    let is_stream =
        parts.headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes() == answers::EVENTS.as_bytes());
    let kind = match (is_stream, body.is_empty()) {
        (true, _) => BodyKind::Events,
        (false, true) => BodyKind::None,
        (false, false) => BodyKind::Whole,
    };
    let head = ForwardedHead { status: parts.status.as_u16(), headers: chosen(&parts.headers, &RETURNED), body: kind };
    pipe.send(serde_json::to_vec(&head).unwrap_or_default().into());
    loop {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            // The client has left, or is too slow.
            _ = pipe.receive() => return,
            () = closed(connection) => return,
        };
        let Some(Ok(frame)) = frame else { break };
        let Ok(mut data) = frame.into_data() else { continue };
        pipe.send(data.copy_to_bytes(data.remaining()));
        pipe.room().await;
    }
    pipe.finish();
}

/// Ready when the front closes the connection.
async fn closed(connection: &Connection) {
    poll_fn(|cx| match connection.poll_wish(cx) {
        CloseRequest::Stay | CloseRequest::HandOver => Poll::Pending,
        CloseRequest::Close | CloseRequest::Cut => Poll::Ready(()),
    })
    .await;
}
