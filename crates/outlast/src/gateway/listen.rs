//! The HTTP front: one endpoint for clients of both eras, and pages for operators and monitoring.
//!
//! Its owner polls it for events and tells it what to send. Each connection is a task on the same thread; a slow,
//! silent or lost client does not affect the others.

use std::{
    cell::RefCell,
    collections::HashMap,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    pin::{Pin, pin},
    rc::Rc,
    task::{Context, Poll},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use hyper::{HeaderMap, Method, StatusCode, server::conn::http1, service::service_fn};
use outlast_core::{
    front,
    gateway::{Client, Front, Said, Ticket, Who},
    message::{self, Id, Outline, Walk},
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    time::{Sleep, sleep_until},
};

pub mod address;
mod agree;
mod answers;
mod cors;
mod driver;
mod forward;
mod headers;
mod order;
mod pages;
mod request;
mod socket;
mod stream;
mod tls;

use driver::{FrontDriver, Shared};
pub use headers::Names;
use order::SessionOrder;
use outlast_os as os;
use socket::{CloseRequest, Connection, Ends, Peer, Socket};
pub use tls::Certificate;
use tls::Transport;

#[cfg(unix)]
use driver::SavedFront;
#[cfg(unix)]
use outlast_os::handover::{Handover, Received};
#[cfg(unix)]
use serde::{Deserialize, Serialize};

use super::{mirrored::Mirrors, session_store::SessionStore};
use crate::{
    cluster::replica::{ClusterStore, SharedReplica},
    state::journal::Origin,
};

/// Connections accepted in one turn of the loop; further ones are accepted in the next turn.
const ACCEPTS_MAX: usize = 8;
/// How long accepting pauses if the system has no descriptor left.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// The shortest time between two checks of the deadlines.
const SWEEP_MIN: Duration = Duration::from_millis(20);
/// Descriptors that are reserved for backends and files: with all connections in use, a backend can still be
/// restarted.
const RESERVED: usize = 256;
/// Refused connections that get an answer at the same time; further ones are closed without one.
const TURNED_AWAY_MAX: usize = 64;
/// How long a refused connection is read from.
const TURN_AWAY_MAX: Duration = Duration::from_secs(1);
/// A longer head of a request is refused.
const HEAD_MAX: usize = 32 << 10;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// An event of the front.
#[derive(Debug)]
pub enum FrontEvent {
    Came {
        client: Client,
        front: Front,
        who: Who,
    },
    /// A session that an earlier gateway opened, with the messages that its client sent there.
    Restored {
        client: Client,
        who: Who,
        state: Box<front::record::SessionState>,
    },
    /// For the log and for people.
    Note(String),
    /// One JSON-RPC message. The members of a batch are separate events.
    Said {
        client: Client,
        message: Bytes,
    },
    /// The same for one request, with its parsed outline.
    Requested {
        client: Client,
        message: Bytes,
        outline: Outline,
    },
    /// The same for a long response to a request of the gateway, which was parsed before.
    SaidLong {
        client: Client,
        message: Bytes,
        walk: Box<Walk>,
    },
    /// The client left, or its session expired. Not reported for a client that the owner dropped.
    Left {
        client: Client,
    },
    /// When the credentials of a client expire. Reported when that changes.
    Allowed {
        client: Client,
        until: Option<Instant>,
    },
    Page(Box<Page>),
    Refused(Box<Refused>),
}

/// A request that was refused before it was forwarded, for audit and metrics.
#[derive(Debug)]
pub struct Refused {
    /// One of a fixed set of names.
    pub kind: &'static str,
    /// The body of the answer, which contains a JSON-RPC error.
    pub told: Bytes,
    pub method: Method,
    /// The start of its path.
    pub path: String,
    pub peer: Rc<str>,
    /// If the client was identified.
    pub who: Option<Rc<Who>>,
    /// The first digits of the session id that it named.
    pub session: Option<u32>,
}

/// A request for `/health`, `/ready`, `/metrics` or a path below `/api/`. Each ticket must be answered once.
#[derive(Debug)]
pub struct Page {
    pub peer: Rc<str>,
    pub ticket: Ticket,
    /// `POST` only below `/api/`.
    pub method: Method,
    pub path: String,
    pub query: String,
    pub body: Bytes,
    /// `/health` and `/ready` need no authentication.
    pub who: Who,
}

#[derive(Debug, Clone)]
pub struct PageAnswer {
    pub status: StatusCode,
    /// Its content type.
    pub kind: &'static str,
    /// Names in lower case.
    pub headers: Vec<(&'static str, String)>,
    pub body: Bytes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub connections: usize,
    /// Sessions of the handshake era.
    pub sessions: usize,
    /// Stored sessions whose clients have not come back since the start.
    pub sessions_stored: usize,
    /// Sessions that a restart would end, because their records could not be written.
    pub sessions_unrecorded: usize,
    /// Unanswered requests of the stateless era, including subscriptions.
    pub requests: usize,
    /// Clients of the stateless era that sent a request in the last five minutes.
    pub stateless: usize,
}

/// Identifies the client of a request by `Authorization` and `X-API-Key`.
pub type Auth = Box<dyn Fn(&HeaderMap) -> Result<Identity, Unauthorized>>;

/// A client that has authenticated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub who: Who,
    /// When its credentials expire.
    pub until: Option<SystemTime>,
}

impl From<Who> for Identity {
    fn from(who: Who) -> Identity {
        Identity { who, until: None }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unauthorized {
    /// For `WWW-Authenticate`.
    pub challenge: String,
    /// One sentence for the client.
    pub why: String,
}

/// The settings of the front. They can be changed while it runs.
pub struct Options {
    pub address: SocketAddr,
    /// Further host names under which the front answers, without a port.
    pub hosts: Vec<String>,
    /// Further origins whose pages may use the front.
    pub origins: Vec<String>,
    pub auth: Option<Auth>,
    /// Without it the front uses plain HTTP.
    pub tls: Option<Certificate>,
    /// The profiles that a client may choose by its path or by a header.
    pub profiles: Vec<String>,
    pub limits: Limits,
}

/// Limits of the front, and what happens at each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// A larger body is refused (413) before it is read.
    pub body_max: usize,
    /// The size of all bodies that are being read; a body that would exceed it is refused (503).
    pub bodies_max: usize,
    /// At the limit a waiting connection of the address with the most of them is closed; if there is no address with
    /// more than the new connection's, the new one gets an error (503). The limit is lower if the system allows fewer
    /// descriptors.
    pub connections_max: usize,
    /// Connections of one address that wait for a request or for the rest of its head; beyond it the one that has waited
    /// longest is closed.
    pub idle_of_address_max: usize,
    /// Beyond it the session of the same client that was idle longest is closed; if the client has no idle session,
    /// the new one is refused (503).
    pub sessions_max: usize,
    /// The same for the sessions of one client, if clients authenticate.
    pub sessions_of_client_max: usize,
    /// A session without a connection and without a request for this long expires.
    pub session_ttl: Duration,
    /// A connection whose request head is incomplete after this is closed.
    pub head_timeout: Duration,
    /// A body that is incomplete after this, and a second for each 64 KiB received, is refused (408).
    pub body_timeout: Duration,
    /// A connection that is idle for this long is closed.
    pub idle_timeout: Duration,
    /// A connection that reads none of the data sent to it for this long is closed.
    pub write_timeout: Duration,
    /// A stream that was silent for this long gets a keep-alive.
    pub ping: Duration,
    /// A request without an answer for this long is answered by a stream, which the client can resume. At most a second
    /// in revisions that can resume each stream.
    pub quiet: Duration,
    /// A reader with more unsent bytes is disconnected, and may resume its stream.
    pub stream_bytes_max: usize,
    /// Unsent bytes of responses, of all connections together. Beyond it the slow connection with the most unsent
    /// bytes is closed, then the next, until the rest fits.
    pub responses_max: usize,
    /// Events that a session keeps for resumption; older ones are dropped.
    pub events_max: usize,
    pub events_bytes_max: usize,
    /// Of all sessions together; the session that keeps the most drops events first.
    pub events_total_max: usize,
}

impl Limits {
    /// The limits that the state machine of the front applies.
    fn of_sessions(&self) -> front::Limits {
        front::Limits {
            sessions_max: self.sessions_max,
            sessions_of_client_max: self.sessions_of_client_max,
            session_ttl: self.session_ttl,
            ping: self.ping,
            quiet: self.quiet,
            events_max: self.events_max,
            events_bytes_max: self.events_bytes_max,
            events_total_max: self.events_total_max,
        }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body_max: 32 << 20,
            bodies_max: 256 << 20,
            connections_max: 1024,
            idle_of_address_max: 256,
            sessions_max: 1024,
            sessions_of_client_max: 256,
            session_ttl: Duration::from_secs(3600),
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(120),
            write_timeout: Duration::from_secs(30),
            ping: Duration::from_secs(15),
            quiet: Duration::from_secs(10),
            stream_bytes_max: 8 << 20,
            responses_max: 256 << 20,
            events_max: 1000,
            events_bytes_max: 4 << 20,
            events_total_max: 64 << 20,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("refusing to listen on {address} without authentication")]
    Unguarded { address: SocketAddr },
    #[error("cannot listen on {address}")]
    Os { address: SocketAddr, source: io::Error },
}

impl ListenError {
    pub fn hint(&self) -> Option<String> {
        match self {
            ListenError::Unguarded { address } => Some(format!(
                "configure authentication (`[auth]`), or listen on {}",
                SocketAddr::new(
                    if address.is_ipv4() { IpAddr::from([127, 0, 0, 1]) } else { std::net::Ipv6Addr::LOCALHOST.into() },
                    address.port()
                )
            )),
            ListenError::Os { source, .. } => match source.kind() {
                io::ErrorKind::AddrInUse => {
                    Some("another program listens there: choose another port, or 0 for any free port".into())
                }
                io::ErrorKind::AddrNotAvailable => Some("no network interface of this machine has this address".into()),
                io::ErrorKind::PermissionDenied => {
                    Some("ports below 1024 need privileges: choose a higher port".into())
                }
                _ => None,
            },
        }
    }
}

impl Options {
    fn check(&self) -> Result<(), ListenError> {
        match self.address.ip().is_loopback() || self.auth.is_some() {
            true => Ok(()),
            false => Err(ListenError::Unguarded { address: self.address }),
        }
    }

    fn names(&self) -> Names {
        // If all clients authenticate and no names are configured, every host name is accepted.
        let any_host = self.auth.is_some() && self.hosts.is_empty() && !self.address.ip().is_loopback();
        Names { hosts: self.hosts.clone(), origins: self.origins.clone(), any_host }
    }

    /// Limits the connections to the number of available descriptors.
    fn limits(&self) -> Limits {
        let wanted = self.limits.connections_max;
        let room = os::room_for_descriptors((wanted + RESERVED) as u64);
        let room = usize::try_from(room).unwrap_or(usize::MAX).saturating_sub(RESERVED).max(1);
        Limits { connections_max: wanted.min(room), ..self.limits.clone() }
    }
}

/// Shared by all connections.
struct HttpEndpoint {
    driver: Shared,
    order: SessionOrder,
    names: RefCell<Names>,
    auth: RefCell<Option<Auth>>,
    profiles: RefCell<Vec<String>>,
    mirrors: RefCell<Mirrors>,
    /// The identity of all clients if there is no authentication.
    anonymous: Rc<Who>,
    /// Only the gateway's own page can have read it: see [`pages`].
    token: String,
    /// The cluster that this gateway is part of.
    cluster: RefCell<Option<SharedReplica>>,
}

/// The front. Must be polled by a runtime that keeps tasks on their thread.
pub struct Listen {
    listener: Option<TcpListener>,
    address: SocketAddr,
    /// The configured address; its port may be 0, so that the system chooses one.
    asked: SocketAddr,
    endpoint: Rc<HttpEndpoint>,
    http: http1::Builder,
    sweep: Pin<Box<Sleep>>,
    sweep_at: Option<Instant>,
    swept: Instant,
    /// When the credentials of requests in progress were last checked.
    checked: Instant,
    turned_away: Rc<()>,
    pause: Option<Pin<Box<Sleep>>>,
    /// For new connections.
    tls: Option<Certificate>,
}

impl Listen {
    /// Must be called within a runtime.
    pub fn bind(options: Options) -> Result<Listen, ListenError> {
        let asked = options.address;
        options.check()?;
        let (listener, address) = bind(asked)?;
        let token = format!("{:032x}", driver::random_id());
        Ok(Listen::over(listener, address, options, token))
    }

    fn over(listener: TcpListener, address: SocketAddr, options: Options, token: String) -> Listen {
        let asked = options.address;
        let mut http = http1::Builder::new();
        // One sweep checks the deadlines of all connections, instead of one timer for each.
        http.header_read_timeout(None).max_header_size(HEAD_MAX).half_close(false);
        let now = Instant::now();
        Listen {
            listener: Some(listener),
            address,
            asked,
            endpoint: Rc::new(HttpEndpoint {
                driver: Rc::new(RefCell::new(FrontDriver::new(options.limits()))),
                order: SessionOrder::default(),
                names: RefCell::new(options.names()),
                auth: RefCell::new(options.auth),
                profiles: RefCell::new(options.profiles),
                mirrors: RefCell::new(HashMap::new()),
                anonymous: Rc::new(Who { name: "local".into(), role: None, profile: None }),
                token,
                cluster: RefCell::new(None),
            }),
            http,
            sweep: Box::pin(sleep_until(now.into())),
            sweep_at: None,
            swept: now,
            checked: now,
            turned_away: Rc::new(()),
            pause: None,
            tls: options.tls,
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stores sessions in `store`, and serves those that it holds already. To be called before the first connection.
    pub fn keep_sessions(&mut self, store: Box<dyn SessionStore>) {
        self.endpoint.driver.borrow_mut().keep_sessions(store);
    }

    /// The URL for clients, without a path.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// The URL of the status page for a browser on this machine.
    pub fn status_page(&self) -> String {
        let ip = match self.address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
            IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
            ip => ip,
        };
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}/", SocketAddr::new(ip, self.address.port()))
    }

    /// True if other machines can reach it and the traffic is not encrypted.
    pub fn is_readable(&self) -> bool {
        self.tls.is_none() && !self.address.ip().is_loopback()
    }

    pub fn asked(&self) -> SocketAddr {
        self.asked
    }

    /// The next event.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<FrontEvent> {
        if let Some(heard) = self.endpoint.driver.borrow_mut().next_heard() {
            return Poll::Ready(heard);
        }
        self.accept(cx);
        self.look_at_time(cx);
        let mut driver = self.endpoint.driver.borrow_mut();
        driver.poll_store(cx);
        driver.poll_heard(cx)
    }

    /// Without `about`, the message goes to the general stream of a session.
    pub fn tell(&mut self, client: Client, message: Bytes, about: Option<Id>, said: Said) {
        self.endpoint.driver.borrow_mut().tell(client, message, about, said, Instant::now());
    }

    /// Ends the conversation: a session is removed, a request ended.
    pub fn drop_client(&mut self, client: Client) {
        self.endpoint.driver.borrow_mut().drop_client(client, Instant::now());
    }

    pub fn answer_page(&mut self, ticket: Ticket, answer: PageAnswer) {
        self.endpoint.driver.borrow_mut().answer_page(ticket, answer);
    }

    /// Answers with a stream of all events that are published from now on.
    pub fn watch(&mut self, ticket: Ticket) {
        self.endpoint.driver.borrow_mut().watch(ticket, Instant::now());
    }

    /// Whether a watcher would receive a published event.
    pub fn has_watchers(&self) -> bool {
        self.endpoint.driver.borrow().has_watchers()
    }

    /// Sends an event to all watchers, or to the one with this ticket. The data is JSON.
    pub fn publish(&mut self, ticket: Option<Ticket>, name: &str, data: &str) {
        self.endpoint.driver.borrow_mut().publish(ticket, name, data, Instant::now());
    }

    /// The address of a client, and its session.
    pub fn origin(&self, client: Client) -> Origin {
        self.endpoint.driver.borrow().origin(client)
    }

    /// The URL of the status page for users that the system cannot identify as the user that runs the gateway.
    pub fn page_with_token(&self) -> String {
        format!("{}#token={}", self.status_page(), self.endpoint.token)
    }

    /// The current numbers of clients.
    pub fn counts(&self) -> Counts {
        self.endpoint.driver.borrow().counts(Instant::now())
    }

    /// The arguments that clients of the stateless era mirror in headers, by the tool name that they see.
    pub fn set_mirrors(&mut self, mirrors: Mirrors) {
        *self.endpoint.mirrors.borrow_mut() = mirrors;
    }

    /// Applies a changed configuration, all of it or nothing. Existing connections stay, even if the address changes.
    /// True if the front now listens on another address.
    pub fn configure(&mut self, options: Options) -> Result<bool, ListenError> {
        options.check()?;
        // Without a listener, an earlier move has failed, and so has its rollback.
        let is_elsewhere = options.address != self.asked || self.listener.is_none();
        let moves = is_elsewhere && !self.endpoint.driver.borrow().is_closing();
        if moves {
            self.move_to(options.address)?;
        }
        self.endpoint.names.replace(options.names());
        self.endpoint.profiles.replace(options.profiles.clone());
        self.tls = options.tls.clone();
        self.endpoint.driver.borrow_mut().set_limits(options.limits(), Instant::now());
        self.set_auth(options.auth)?;
        Ok(moves)
    }

    /// If it fails, the front listens on the old address again.
    fn move_to(&mut self, asked: SocketAddr) -> Result<(), ListenError> {
        let bound = match bind(asked) {
            // The old listener blocks the new one: the same port, for all addresses instead of one, or the reverse.
            Err(ListenError::Os { source, .. })
                if source.kind() == io::ErrorKind::AddrInUse && asked.port() == self.address.port() =>
            {
                self.listener = None;
                bind(asked).inspect_err(|_| self.listener = bind(self.address).ok().map(|(listener, _)| listener))
            }
            bound => bound,
        };
        let (listener, address) = bound?;
        (self.listener, self.address, self.asked) = (Some(listener), address, asked);
        Ok(())
    }

    /// Sets the authentication for new and existing clients. It is required on addresses other than loopback.
    pub fn set_auth(&mut self, auth: Option<Auth>) -> Result<(), ListenError> {
        if auth.is_none() && !self.address.ip().is_loopback() {
            return Err(ListenError::Unguarded { address: self.address });
        }
        let has_some = auth.is_some();
        let had_some = self.endpoint.auth.replace(auth).is_some();
        self.check_passes();
        if let Some(auth) = &*self.endpoint.auth.borrow() {
            self.endpoint.driver.borrow_mut().check_passes(auth, Instant::now());
        }
        let driver = self.endpoint.driver.borrow();
        match (had_some, has_some) {
            (false, true) => driver.connections().for_each(|connection| connection.ask_for_pass()),
            // The front may have listened on another address before, where connections were accepted because they
            // authenticated.
            (true, false) => driver.connections().for_each(|connection| connection.ask_for_home()),
            _ => {}
        }
        Ok(())
    }

    /// Closes connections whose credentials are no longer valid: an answer may take hours, longer than a token is
    /// valid.
    fn check_passes(&mut self) {
        if let Some(auth) = &*self.endpoint.auth.borrow() {
            self.endpoint.driver.borrow().connections().for_each(|connection| connection.check_pass(auth));
        }
        self.checked = Instant::now();
    }

    /// Sessions are those of a cluster: their records are in NATS, and any replica accepts their requests.
    pub(crate) fn join(&mut self, replica: SharedReplica) {
        self.keep_sessions(Box::new(ClusterStore(replica.clone())));
        self.endpoint.cluster.replace(Some(replica));
    }

    /// A request of a session that another replica forwards.
    pub(crate) fn serve_forwarded(&self, stream: u64, request: Bytes) {
        if let Some(replica) = self.endpoint.cluster.borrow().clone() {
            tokio::task::spawn_local(forward::serve(self.endpoint.clone(), replica, stream, request));
        }
    }

    /// Another replica is the home of this session now.
    pub(crate) fn session_moved(&mut self, key: front::record::RecordKey) {
        self.endpoint.driver.borrow_mut().session_moved(key, Instant::now());
    }

    /// While requests are held, those that arrive wait in the buffers of the system.
    pub fn hold_requests(&mut self, wanted: bool) {
        self.endpoint.driver.borrow_mut().hold_requests(wanted);
    }

    /// Why another program cannot take over now.
    pub fn busy(&self) -> Option<String> {
        self.endpoint.driver.borrow().busy()
    }

    /// Ends all streams, and waits for the sockets of connections.
    pub fn begin_handover(&mut self) {
        self.endpoint.driver.borrow_mut().begin_handover(Instant::now());
    }

    /// Ready when all connections were closed or can be handed over.
    pub fn poll_handed_over(&mut self, cx: &Context<'_>) -> Poll<()> {
        self.endpoint.driver.borrow_mut().poll_handed_over(cx)
    }

    /// Closes the connections that were not handed over in time. Their clients resume their streams.
    pub fn cut_connections(&mut self) {
        self.endpoint.driver.borrow().connections().for_each(|connection| connection.cut());
    }

    /// The connections stay here.
    pub fn end_handover(&mut self) {
        let sockets = self.endpoint.driver.borrow_mut().end_handover();
        sockets.into_iter().for_each(|(tcp, unread)| self.welcome(tcp, unread));
    }

    /// Accepts no more connections. Streams end, and each connection closes after its current answer.
    pub fn close(&mut self) {
        self.listener = None;
        self.endpoint.driver.borrow_mut().close(Instant::now());
    }

    /// After [`Listen::close`]: ready when everything is sent.
    pub fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.look_at_time(cx);
        let mut driver = self.endpoint.driver.borrow_mut();
        while driver.poll_heard(cx).is_ready() {}
        if driver.is_over() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn accept(&mut self, cx: &mut Context<'_>) {
        if let Some(pause) = &mut self.pause {
            if pause.as_mut().poll(cx).is_pending() {
                return;
            }
            self.pause = None;
        }
        if self.endpoint.driver.borrow().holds_requests() {
            return;
        }
        let Some(listener) = &self.listener else { return };
        for _ in 0..ACCEPTS_MAX {
            match listener.poll_accept(cx) {
                Poll::Pending => return,
                Poll::Ready(Ok((tcp, _))) => self.welcome(tcp, Bytes::new()),
                // The client has disconnected already, or no descriptor is left, which an immediate retry does not
                // fix.
                Poll::Ready(Err(error)) if is_passing(&error) => {}
                Poll::Ready(Err(_)) => {
                    let mut pause = Box::pin(tokio::time::sleep(ACCEPT_AGAIN));
                    let _ = pause.as_mut().poll(cx);
                    self.pause = Some(pause);
                    return;
                }
            }
        }
        cx.waker().wake_by_ref();
    }

    /// `unread` was read already, by the last program of this process.
    fn welcome(&self, tcp: TcpStream, unread: Bytes) {
        let driver = &self.endpoint.driver;
        let Some((key, connection)) = driver.borrow_mut().connection_came(Ends::of(&tcp), Instant::now()) else {
            // The count includes the one of this front. With TLS the client could not read the answer.
            if self.tls.is_none() && Rc::strong_count(&self.turned_away) <= TURNED_AWAY_MAX {
                tokio::task::spawn_local(turn_away(tcp, self.turned_away.clone()));
            }
            return;
        };
        let guard = Leaving { driver: driver.clone(), key };
        socket::set_options(&tcp, driver.borrow().limits());
        let (endpoint, service_connection) = (self.endpoint.clone(), connection.clone());
        let service = service_fn(move |request| request::serve(endpoint.clone(), service_connection.clone(), request));
        let Some(tls) = self.tls.clone() else {
            let peer = Peer::new(Transport::Plain(tcp), unread, connection.clone());
            let socket = Socket::new(peer.clone(), driver.clone());
            let (http, driver) = (self.http.serve_connection(socket, service), driver.clone());
            tokio::task::spawn_local(async move {
                let _guard = guard;
                if let Some(socket) = attend(&connection, peer, http, true).await {
                    driver.borrow_mut().handed_over(socket);
                }
            });
            return;
        };
        let (http, driver, handshake_max) = (self.http.clone(), driver.clone(), driver.borrow().limits().head_timeout);
        tokio::task::spawn_local(async move {
            let _guard = guard;
            let handshake = tokio::time::timeout(handshake_max, tls.accept(tcp));
            if let Some(Ok(Some(transport))) = unless_closed(&connection, handshake).await {
                let peer = Peer::new(transport, Bytes::new(), connection.clone());
                let socket = Socket::new(peer.clone(), driver);
                attend(&connection, peer, http.serve_connection(socket, service), false).await;
            }
        });
    }

    fn look_at_time(&mut self, cx: &mut Context<'_>) {
        loop {
            let Some(due) = self.endpoint.driver.borrow().due() else { return };
            // Limits how often the sweep runs.
            let due = due.max(self.swept + SWEEP_MIN);
            if self.sweep_at != Some(due) {
                self.sweep_at = Some(due);
                self.sweep.as_mut().reset(due.into());
            }
            if self.sweep.as_mut().poll(cx).is_pending() {
                return;
            }
            self.swept = Instant::now();
            self.sweep_at = None;
            self.endpoint.driver.borrow_mut().time_passed(self.swept);
            let ping = self.endpoint.driver.borrow().limits().ping;
            if self.checked + ping <= self.swept {
                self.check_passes();
            }
        }
    }
}

/// The front as saved state.
#[cfg(unix)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedListen {
    /// None if an earlier move to another address has failed, and so has its rollback.
    listener: Option<i32>,
    pub(crate) asked: SocketAddr,
    address: SocketAddr,
    /// The status page in a browser has it.
    token: String,
    front: SavedFront,
}

#[cfg(unix)]
impl Listen {
    pub(crate) fn save(&self, handover: &mut Handover) -> SavedListen {
        SavedListen {
            listener: self.listener.as_ref().map(|listener| handover.keep_tcp(listener)),
            asked: self.asked,
            address: self.address,
            token: self.endpoint.token.clone(),
            front: self.endpoint.driver.borrow().save(handover, Instant::now()),
        }
    }

    /// Takes over the listener of the last program of this process; its sessions and connections follow with
    /// [`Listen::go_on`]. Must be called within a runtime.
    pub(crate) fn restore(options: Options, saved: &SavedListen, received: &mut Received) -> io::Result<Listen> {
        options.check().map_err(io::Error::other)?;
        let number = saved.listener.ok_or_else(|| io::Error::other("the gateway had no listener"))?;
        let listener = TcpListener::from_std(received.take_listener(number)?)?;
        Ok(Listen::over(listener, saved.address, options, saved.token.clone()))
    }

    /// Sessions and connections continue. After [`Listen::keep_sessions`].
    pub(crate) fn go_on(&mut self, saved: SavedListen, received: &mut Received) -> io::Result<()> {
        let connections = saved.front.connections.clone();
        self.endpoint.driver.borrow_mut().go_on(saved.front, Instant::now());
        for (number, unread) in connections {
            let tcp = TcpStream::from_std(received.take_connection(number)?)?;
            self.welcome(tcp, unread.bytes());
        }
        Ok(())
    }

    /// Whether this program could continue with the sessions.
    pub(crate) fn check(limits: &Limits, saved: SavedListen) {
        FrontDriver::new(limits.clone()).go_on(saved.front, Instant::now());
    }
}

/// The result, unless the connection is told to close first.
async fn unless_closed<T>(connection: &Connection, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    std::future::poll_fn(|cx| match connection.poll_wish(cx) {
        CloseRequest::Stay => work.as_mut().poll(cx).map(Some),
        CloseRequest::Close | CloseRequest::HandOver | CloseRequest::Cut => Poll::Ready(None),
    })
    .await
}

/// Serves a connection until it ends or is told to close. Returns its socket if another program is to continue with it; a
/// connection with TLS closes instead, as its keys cannot be handed over.
async fn attend<F>(
    connection: &Connection,
    peer: Rc<Peer>,
    mut http: http1::Connection<Socket, F>,
    is_plain: bool,
) -> Option<(TcpStream, Bytes)>
where
    F: hyper::service::HttpService<hyper::body::Incoming, ResBody = stream::Body>,
    F::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut is_closing = false;
    let is_handed_over = std::future::poll_fn(|cx| {
        let wish = connection.poll_wish(cx);
        match wish {
            CloseRequest::Stay => {}
            CloseRequest::HandOver if is_plain => {}
            CloseRequest::Close | CloseRequest::HandOver if is_closing => {}
            CloseRequest::Close | CloseRequest::HandOver => {
                is_closing = true;
                Pin::new(&mut http).graceful_shutdown();
            }
            CloseRequest::Cut => return Poll::Ready(false),
        }
        // The result is ignored: requests that wait on the connection are notified by their own drop.
        loop {
            if Pin::new(&mut http).poll(cx).is_ready() || peer.poll_closed(cx).is_ready() {
                return Poll::Ready(false);
            }
            if !peer.must_read_again() {
                break;
            }
        }
        match wish == CloseRequest::HandOver && is_plain && connection.can_be_handed_over() {
            true => Poll::Ready(true),
            false => Poll::Pending,
        }
    })
    .await;
    if !is_handed_over {
        return None;
    }
    let parts = http.into_parts();
    drop(parts.io);
    Rc::into_inner(peer)?.into_plain(&parts.read_buf)
}

/// Removes the connection from the driver on drop.
struct Leaving {
    driver: Shared,
    key: u64,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.driver.borrow_mut().connection_left(self.key);
    }
}

/// Answers a connection beyond the limit with an error.
async fn turn_away(mut tcp: TcpStream, _counted: Rc<()>) {
    let body = message::error_line("null", answers::INVALID_REQUEST, "too many connections are open: try later", None);
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let _ = tokio::time::timeout(TURN_AWAY_MAX, async {
        tcp.write_all(head.as_bytes()).await?;
        tcp.write_all(&body).await?;
        tcp.shutdown().await?;
        // If unread data were left, the close would reset the connection and discard the answer.
        tokio::io::copy(&mut tcp, &mut tokio::io::sink()).await
    })
    .await;
}

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Also returns the actual address.
fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ListenError> {
    let listener = bind_socket(address).map_err(|source| ListenError::Os { address, source })?;
    let bound = listener.local_addr().map_err(|source| ListenError::Os { address, source })?;
    Ok((listener, bound))
}

fn bind_socket(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket2::Socket::new(
        socket2::Domain::for_address(address),
        socket2::Type::STREAM,
        Some(socket2::Protocol::TCP),
    )?;
    // On Windows this option would allow another process to take over the port.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}
