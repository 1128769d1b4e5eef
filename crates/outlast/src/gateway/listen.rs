//! The HTTP front: one endpoint for clients of both eras, and a few pages for people and their instruments.
//!
//! One owner polls it for what was heard and tells it what to say. Each connection is a task of the same thread; a
//! client that is slow, silent or gone is nobody's business but its own.

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
    gateway::{Client, Front, Said, Ticket, Who},
    message::{self, Id, Outline},
};
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    time::{Sleep, sleep_until},
};

pub mod address;
mod agree;
mod cors;
mod headers;
mod house;
mod pages;
mod request;
mod session;
mod socket;
mod stream;
mod tls;
mod words;

pub use agree::{Mirror, Mirrors, mirrors_of};
pub use headers::Names;
use house::{House, Shared};
use socket::{Ends, Line, Socket, Wish};
pub use tls::Certificate;
use tls::Transport;

use crate::{journal::Origin, os};

/// Let in at one turn of the loop; further ones at the next.
const ACCEPTS_MAX: usize = 8;
/// How long we wait for a descriptor if the system has none left.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// How often time is looked at, at most.
const SWEEP_MIN: Duration = Duration::from_millis(20);
/// Descriptors that connections leave to backends and files: however many come, a backend can be started again.
const RESERVED: usize = 256;
/// Told that they are turned away at a time; further ones are just closed.
const TURNED_AWAY_MAX: usize = 64;
/// How long we listen to one that is turned away.
const TURN_AWAY_MAX: Duration = Duration::from_secs(1);
/// A longer head of a request is refused.
const HEAD_MAX: usize = 32 << 10;
/// Connections that wait to be let in.
const BACKLOG: i32 = 1024;
/// Something that came in.
#[derive(Debug)]
pub enum Heard {
    Came {
        client: Client,
        front: Front,
        who: Who,
    },
    /// One JSON-RPC message. A batch comes as its members.
    Said {
        client: Client,
        message: Bytes,
    },
    /// The same for one request, with what was read of it.
    Asked {
        client: Client,
        message: Bytes,
        outline: Outline,
    },
    /// By itself, or because its session was over. Never told of a client that the owner dropped.
    Left {
        client: Client,
    },
    /// When the credentials of a client end. Told when that changes.
    Allowed {
        client: Client,
        until: Option<Instant>,
    },
    Page(Box<Page>),
    Refused(Box<Refused>),
}

/// A request that was refused before it was heard, for audit and metrics.
#[derive(Debug)]
pub struct Refused {
    /// One of a few names in the program.
    pub kind: &'static str,
    /// As the client was told, with a JSON-RPC error in it.
    pub told: Bytes,
    pub method: Method,
    /// Its beginning.
    pub path: String,
    pub peer: Rc<str>,
    /// If that was found out.
    pub who: Option<Rc<Who>>,
    /// The first digits of the session id that it named.
    pub session: Option<u32>,
}

/// `/health`, `/ready`, `/metrics` or something below `/api/`. Each ticket wants one answer.
#[derive(Debug)]
pub struct Page {
    pub peer: Rc<str>,
    pub ticket: Ticket,
    /// `POST` only below `/api/`.
    pub method: Method,
    pub path: String,
    pub query: String,
    pub body: Bytes,
    /// Of `/health` and `/ready` nobody is asked who they are.
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
    /// Of the handshake era.
    pub sessions: usize,
    /// Of the stateless era, not yet answered; subscriptions among them.
    pub requests: usize,
    /// Clients of the stateless era that sent a request in the last five minutes, or wait for one: see
    /// [`house::STATELESS_FOR`].
    pub stateless: usize,
}

/// Finds out who sends a request, by its `Authorization` and `X-API-Key`.
pub type Auth = Box<dyn Fn(&HeaderMap) -> Result<Identity, Unauthorized>>;

/// A client that proved who it is.
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

/// What is decided before the first connection, and may be decided anew later.
pub struct Options {
    pub address: SocketAddr,
    /// Further hosts that we answer to, without a port.
    pub hosts: Vec<String>,
    /// Further origins whose pages may use us.
    pub origins: Vec<String>,
    pub auth: Option<Auth>,
    /// Without it the front speaks plain HTTP.
    pub tls: Option<Certificate>,
    /// The profiles that a client may choose by its path or by a header.
    pub profiles: Vec<String>,
    pub limits: Limits,
}

/// Bounds of the front, and what happens at each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// A larger body is refused (413) before it is read.
    pub body_max: usize,
    /// Bodies that are being read, all together; one that would go beyond is refused (503).
    pub bodies_max: usize,
    /// A connection more is told so (503) and closed. There are fewer where the system allows fewer descriptors.
    pub connections_max: usize,
    /// Connections of one address that are between two requests; with one more the one that was idle longest is closed.
    pub idle_of_address_max: usize,
    /// With a session more, the one of the same client that was idle longest ends; if it has none that is idle, the new one is
    /// refused (503).
    pub sessions_max: usize,
    /// The same for the sessions of one client, where clients prove who they are.
    pub sessions_of_client_max: usize,
    /// A session that nobody is connected to and that was not heard of for so long ends.
    pub session_ttl: Duration,
    /// A request whose head is not whole after this is closed.
    pub head_timeout: Duration,
    /// A body that is not whole after this, and a second for each 64 KiB that came, is refused (408).
    pub body_timeout: Duration,
    /// A connection between two requests is closed after this.
    pub idle_timeout: Duration,
    /// A connection that takes nothing of what we have to say for so long is closed.
    pub write_timeout: Duration,
    /// A stream that was silent for so long gets a sign of life.
    pub ping: Duration,
    /// A request without an answer for so long is answered by a stream: it can then be taken up again.
    pub quiet: Duration,
    /// A reader that lets more wait is cut off, and may take its stream up again.
    pub stream_bytes_max: usize,
    /// Bytes of responses that all connections together have not taken yet. Beyond it the slow connection with the most is
    /// closed, and the next one, until the rest fits.
    pub responses_max: usize,
    /// Events that a session keeps for those who come back; older ones are forgotten.
    pub events_max: usize,
    pub events_bytes_max: usize,
    /// Of all sessions together; whoever keeps the most forgets first.
    pub events_total_max: usize,
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
    #[error("will not listen on {address}: whoever reaches it could use every backend")]
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
                    Some("something else listens there: choose another port, or 0 for any that is free".into())
                }
                io::ErrorKind::AddrNotAvailable => Some("no network of this machine has that address".into()),
                io::ErrorKind::PermissionDenied => {
                    Some("ports below 1024 need a privilege: choose a higher one".into())
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
        // Where everybody proves who they are, and no names were configured, any name will do.
        let any_host = self.auth.is_some() && self.hosts.is_empty() && !self.address.ip().is_loopback();
        Names { hosts: self.hosts.clone(), origins: self.origins.clone(), any_host }
    }

    /// Not more connections than the system has descriptors for.
    fn limits(&self) -> Limits {
        let wanted = self.limits.connections_max;
        let room = os::room_for_descriptors((wanted + RESERVED) as u64);
        let room = usize::try_from(room).unwrap_or(usize::MAX).saturating_sub(RESERVED).max(1);
        Limits { connections_max: wanted.min(room), ..self.limits.clone() }
    }
}

/// What every connection needs to know.
struct Door {
    house: Shared,
    names: RefCell<Names>,
    auth: RefCell<Option<Auth>>,
    profiles: RefCell<Vec<String>>,
    mirrors: RefCell<Mirrors>,
    /// Who everybody is where nobody is asked.
    nobody: Rc<Who>,
    /// Only a page of our own can have read it: see [`pages`].
    token: String,
}

/// The front. Must be polled within a `LocalSet`, or whatever else lets tasks stay on their thread.
pub struct Listen {
    listener: Option<TcpListener>,
    address: SocketAddr,
    /// The same as it was asked for, where the system was to choose a port.
    asked: SocketAddr,
    door: Rc<Door>,
    http: http1::Builder,
    sweep: Pin<Box<Sleep>>,
    sweep_at: Option<Instant>,
    swept: Instant,
    /// When those who are being answered were last asked whether they still may be.
    checked: Instant,
    turned_away: Rc<()>,
    pause: Option<Pin<Box<Sleep>>>,
    /// For connections that come from here on.
    tls: Option<Certificate>,
}

impl Listen {
    /// Needs a runtime.
    pub fn bind(options: Options) -> Result<Listen, ListenError> {
        let asked = options.address;
        options.check()?;
        let (listener, address) = bind(asked)?;
        let mut http = http1::Builder::new();
        // Time is looked at in one place for all connections, not by a timer for each.
        http.header_read_timeout(None).max_header_size(HEAD_MAX).half_close(false);
        let now = Instant::now();
        Ok(Listen {
            listener: Some(listener),
            address,
            asked,
            door: Rc::new(Door {
                house: Rc::new(RefCell::new(House::new(options.limits()))),
                names: RefCell::new(options.names()),
                auth: RefCell::new(options.auth),
                profiles: RefCell::new(options.profiles),
                mirrors: RefCell::new(HashMap::new()),
                nobody: Rc::new(Who { name: "local".into(), role: None, profile: None }),
                token: format!("{:032x}", house::mint()),
            }),
            http,
            sweep: Box::pin(sleep_until(now.into())),
            sweep_at: None,
            swept: now,
            checked: now,
            turned_away: Rc::new(()),
            pause: None,
            tls: options.tls,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where clients connect, without a path.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// Where a browser on this machine finds the status page.
    pub fn status_page(&self) -> String {
        let ip = match self.address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
            IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
            ip => ip,
        };
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}/", SocketAddr::new(ip, self.address.port()))
    }

    /// True if other machines can reach it and read all that is said.
    pub fn is_readable(&self) -> bool {
        self.tls.is_none() && !self.address.ip().is_loopback()
    }

    pub fn asked(&self) -> SocketAddr {
        self.asked
    }

    /// The next thing that was heard.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Heard> {
        if let Some(heard) = self.door.house.borrow_mut().next_heard() {
            return Poll::Ready(heard);
        }
        self.accept(cx);
        self.look_at_time(cx);
        self.door.house.borrow_mut().poll_heard(cx)
    }

    /// Without the request that it is about, a message goes to the general stream of a session.
    pub fn tell(&mut self, client: Client, message: Bytes, about: Option<&Id>, said: Said) {
        self.door.house.borrow_mut().tell(client, message, about, said, Instant::now());
    }

    /// The conversation is over: a session is forgotten, a request ended.
    pub fn drop_client(&mut self, client: Client) {
        self.door.house.borrow_mut().drop_client(client);
    }

    pub fn answer_page(&mut self, ticket: Ticket, answer: PageAnswer) {
        self.door.house.borrow_mut().answer_page(ticket, answer);
    }

    /// Answers with events: whatever is published from now on.
    pub fn watch(&mut self, ticket: Ticket) {
        self.door.house.borrow_mut().watch(ticket, Instant::now());
    }

    /// Whether anybody would hear what is published.
    pub fn has_watchers(&self) -> bool {
        self.door.house.borrow().has_watchers()
    }

    /// For whoever watches; with a ticket, only for that one. The data is JSON.
    pub fn publish(&mut self, ticket: Option<Ticket>, name: &str, data: &str) {
        self.door.house.borrow_mut().publish(ticket, name, data, Instant::now());
    }

    /// Where a client is, and its session.
    pub fn origin(&self, client: Client) -> Origin {
        self.door.house.borrow().origin(client)
    }

    /// The address of the status page for those that the system cannot tell to be the user that runs the gateway.
    pub fn page_with_token(&self) -> String {
        format!("{}#token={}", self.status_page(), self.door.token)
    }

    /// Who is there right now.
    pub fn counts(&self) -> Counts {
        self.door.house.borrow().counts(Instant::now())
    }

    /// Which arguments clients of the stateless era mirror in headers, by tool as they see it.
    pub fn set_mirrors(&mut self, mirrors: Mirrors) {
        *self.door.mirrors.borrow_mut() = mirrors;
    }

    /// For a configuration that changed. Whoever is connected stays, wherever those who come next are to come. It is taken
    /// whole or not at all; true if we listen elsewhere from here on.
    pub fn configure(&mut self, options: Options) -> Result<bool, ListenError> {
        options.check()?;
        // Without a listener a move has failed, and the way back, too.
        let is_elsewhere = options.address != self.asked || self.listener.is_none();
        let moves = is_elsewhere && !self.door.house.borrow().is_closing();
        if moves {
            self.move_to(options.address)?;
        }
        self.door.names.replace(options.names());
        self.door.profiles.replace(options.profiles.clone());
        self.tls = options.tls.clone();
        {
            let mut house = self.door.house.borrow_mut();
            house.limits = options.limits();
            // Some may have been idle for too long by now.
            house.want(Instant::now());
        }
        self.set_auth(options.auth)?;
        Ok(moves)
    }

    /// If that fails, we listen where we did.
    fn move_to(&mut self, asked: SocketAddr) -> Result<(), ListenError> {
        let bound = match bind(asked) {
            // All addresses at our port, or one where it was all: then it is we who are in the way.
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

    /// Who may come from here on, and stay. An address beyond loopback stays guarded.
    pub fn set_auth(&mut self, auth: Option<Auth>) -> Result<(), ListenError> {
        if auth.is_none() && !self.address.ip().is_loopback() {
            return Err(ListenError::Unguarded { address: self.address });
        }
        let has_some = auth.is_some();
        let had_some = self.door.auth.replace(auth).is_some();
        self.check_passes();
        if let Some(auth) = &*self.door.auth.borrow() {
            self.door.house.borrow_mut().check_passes(auth, Instant::now());
        }
        let house = self.door.house.borrow();
        match (had_some, has_some) {
            (false, true) => house.lines().for_each(|line| line.ask_for_pass()),
            // We may have listened elsewhere before, and who came to us there was let in because somebody asked.
            (true, false) => house.lines().for_each(|line| line.ask_for_home()),
            _ => {}
        }
        Ok(())
    }

    /// Whoever is being answered and may not be any more is cut off: an answer may take hours, and a token less.
    fn check_passes(&mut self) {
        if let Some(auth) = &*self.door.auth.borrow() {
            self.door.house.borrow().lines().for_each(|line| line.check_pass(auth));
        }
        self.checked = Instant::now();
    }

    /// From here on nobody new is let in. Streams end, and connections close with the answer they are at.
    pub fn close(&mut self) {
        self.listener = None;
        self.door.house.borrow_mut().close();
    }

    /// After [`Listen::close`]: whether the last word is out.
    pub fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.look_at_time(cx);
        let mut house = self.door.house.borrow_mut();
        while house.poll_heard(cx).is_ready() {}
        if house.is_over() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn accept(&mut self, cx: &mut Context<'_>) {
        if let Some(pause) = &mut self.pause {
            if pause.as_mut().poll(cx).is_pending() {
                return;
            }
            self.pause = None;
        }
        let Some(listener) = &self.listener else { return };
        for _ in 0..ACCEPTS_MAX {
            match listener.poll_accept(cx) {
                Poll::Pending => return,
                Poll::Ready(Ok((tcp, _))) => self.welcome(tcp),
                // One who knocked and left, or our own lack of descriptors, which asking again at once does not mend.
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

    fn welcome(&self, tcp: TcpStream) {
        let house = &self.door.house;
        let Some((key, line)) = house.borrow_mut().line_came(Ends::of(&tcp), Instant::now()) else {
            // The count of those who hold it is theirs and ours. With TLS the client could not read what it is told.
            if self.tls.is_none() && Rc::strong_count(&self.turned_away) <= TURNED_AWAY_MAX {
                tokio::task::spawn_local(turn_away(tcp, self.turned_away.clone()));
            }
            return;
        };
        let guard = Leaving { house: house.clone(), key };
        socket::set_options(&tcp, &house.borrow().limits);
        let (door, service_line) = (self.door.clone(), line.clone());
        let service = service_fn(move |request| request::serve(door.clone(), service_line.clone(), request));
        let Some(tls) = self.tls.clone() else {
            let socket = Socket::new(Transport::Plain(tcp), line.clone(), house.clone());
            let connection = self.http.serve_connection(socket, service);
            tokio::task::spawn_local(async move {
                let _guard = guard;
                attend(&line, connection).await;
            });
            return;
        };
        let (http, house, handshake_max) = (self.http.clone(), house.clone(), house.borrow().limits.head_timeout);
        tokio::task::spawn_local(async move {
            let _guard = guard;
            let handshake = tokio::time::timeout(handshake_max, tls.accept(tcp));
            if let Some(Ok(Some(transport))) = unless_closed(&line, handshake).await {
                let socket = Socket::new(transport, line.clone(), house);
                attend(&line, http.serve_connection(socket, service)).await;
            }
        });
    }

    fn look_at_time(&mut self, cx: &mut Context<'_>) {
        loop {
            let Some(due) = self.door.house.borrow().due() else { return };
            // Not too often, however many deadlines there are.
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
            self.door.house.borrow_mut().sweep(self.swept);
            let ping = self.door.house.borrow().limits.ping;
            if self.checked + ping <= self.swept {
                self.check_passes();
            }
        }
    }
}

/// The outcome, unless the connection is told to close before.
async fn unless_closed<T>(line: &Line, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    std::future::poll_fn(|cx| match line.poll_wish(cx) {
        Wish::Stay => work.as_mut().poll(cx).map(Some),
        Wish::Close | Wish::Cut => Poll::Ready(None),
    })
    .await
}

/// A connection, until it is over or is told to go.
async fn attend<F>(line: &Line, connection: http1::Connection<Socket, F>)
where
    F: hyper::service::HttpService<hyper::body::Incoming, ResBody = stream::Body>,
    F::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let mut connection = pin!(connection);
    let mut is_closing = false;
    std::future::poll_fn(|cx| {
        match line.poll_wish(cx) {
            Wish::Stay => {}
            Wish::Close if is_closing => {}
            Wish::Close => {
                is_closing = true;
                connection.as_mut().graceful_shutdown();
            }
            Wish::Cut => return Poll::Ready(()),
        }
        // How it ended matters to nobody: whoever waited for something of it is told by its own end.
        connection.as_mut().poll(cx).map(drop)
    })
    .await;
}

/// The connection is over, whichever way.
struct Leaving {
    house: Shared,
    key: u64,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.house.borrow_mut().line_left(self.key);
    }
}

/// Whoever comes when too many are there is told so, and nothing else.
async fn turn_away(mut tcp: TcpStream, _counted: Rc<()>) {
    let body = message::error_line("null", words::INVALID_REQUEST, "too many connections are open: try later", None);
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 5\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let _ = tokio::time::timeout(TURN_AWAY_MAX, async {
        tcp.write_all(head.as_bytes()).await?;
        tcp.write_all(&body).await?;
        tcp.shutdown().await?;
        // Closed with something unread, the connection would be torn down and our words with it.
        tokio::io::copy(&mut tcp, &mut tokio::io::sink()).await
    })
    .await;
}

fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// With the address that it came to be.
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
    // On Windows the option means something else: that somebody may take our port from us.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}
