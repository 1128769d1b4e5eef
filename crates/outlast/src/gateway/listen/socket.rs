//! One connection: its phase, its deadlines, and how it is told to close.

use std::{
    cell::{Cell, RefCell, RefMut},
    io,
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    pin::{Pin, pin},
    rc::Rc,
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant, SystemTime},
};

use bytes::Bytes;
use hyper::{HeaderMap, rt};
use hyper_util::rt::TokioIo;
use outlast_core::gateway::Who;
use outlast_os::{self as os, PeerUser};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, Interest, ReadBuf},
    net::TcpStream,
};

use super::{Auth, Limits, driver::Shared, tls::Transport};

/// After this long without data the kernel sends keep-alive probes.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(30);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_TRIES: u32 = 3;

/// The phase of a connection. Only `Busy` has no deadline: then the answer depends on the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Between two requests, or before the first.
    Idle(Instant),
    /// A request has begun and its head is incomplete.
    Head(Instant),
    Busy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CloseRequest {
    Stay,
    /// Close after the current answer.
    Close,
    /// Give the socket to the next program after the current answer.
    HandOver,
    /// Close at once.
    Cut,
}

#[derive(Debug)]
pub(super) struct Connection {
    ends: Ends,
    /// The address of the peer, for records.
    peer: Rc<str>,
    /// The user of the peer; looked up once.
    peer_user: Cell<Option<PeerUser>>,
    /// The client of the current request, if it was identified.
    who: RefCell<Option<Rc<Who>>>,
    /// The client has authenticated.
    is_known: Cell<bool>,
    /// When its credentials expire.
    until: Cell<Option<SystemTime>>,
    phase: Cell<Phase>,
    /// Since when the peer has read nothing.
    stalled: Cell<Option<Instant>>,
    wish: Cell<CloseRequest>,
    waker: RefCell<Option<Waker>>,
    /// The credentials of the current request.
    pass: RefCell<Option<Rc<Pass>>>,
    /// Unsent bytes of its responses; they are part of those in `totals`.
    waiting: Cell<usize>,
    totals: Rc<Totals>,
    /// Its current response is a stream of events.
    is_stream: Cell<bool>,
    ahead: Cell<Ahead>,
}

/// Bytes that follow the current request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ahead {
    /// The request is not complete: what arrives belongs to it.
    OfRequest,
    /// The request is complete: what arrives is kept for later.
    Kept,
}

/// What all connections hold together.
#[derive(Debug, Default)]
pub(super) struct Totals {
    /// Bytes of responses.
    unsent: Cell<usize>,
    /// Copies of their descriptors.
    copies: Cell<usize>,
}

impl Totals {
    pub(super) fn unsent(&self) -> usize {
        self.unsent.get()
    }
}

/// The two addresses of a connection; `None` if it was lost before they were read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    pub ours: Option<SocketAddr>,
    pub peers: Option<SocketAddr>,
}

impl Ends {
    pub(super) fn of(tcp: &TcpStream) -> Ends {
        Ends { ours: tcp.local_addr().ok(), peers: tcp.peer_addr().ok() }
    }

    /// It was accepted on a loopback address.
    fn is_local(self) -> bool {
        self.ours.is_some_and(|address| address.ip().is_loopback())
    }
}

/// The credentials of a request, kept because they may expire before the answer is finished.
#[derive(Debug)]
pub(super) struct Pass {
    pub credentials: HeaderMap,
    pub who: Rc<Who>,
    /// When the credentials expire.
    pub until: Option<SystemTime>,
}

impl Pass {
    /// Whether the credentials are still valid for the same client.
    pub(super) fn is_good(&self, auth: &Auth) -> bool {
        auth(&self.credentials).is_ok_and(|found| is_same(&found.who, &self.who))
    }
}

impl Connection {
    pub(super) fn new(ends: Ends, totals: Rc<Totals>, now: Instant) -> Rc<Connection> {
        Rc::new(Connection {
            ends,
            peer: ends.peers.map_or_else(String::new, |peer| peer.to_string()).into(),
            peer_user: Cell::new(None),
            who: RefCell::new(None),
            is_known: Cell::new(false),
            until: Cell::new(None),
            waiting: Cell::new(0),
            totals,
            phase: Cell::new(Phase::Idle(now)),
            stalled: Cell::new(None),
            wish: Cell::new(CloseRequest::Stay),
            waker: RefCell::new(None),
            pass: RefCell::new(None),
            is_stream: Cell::new(false),
            ahead: Cell::new(Ahead::OfRequest),
        })
    }

    /// The connection of a client to another replica, which forwards a request.
    pub(super) fn of_replica(peer: Rc<str>, totals: Rc<Totals>, now: Instant) -> Rc<Connection> {
        let connection = Connection::new(Ends { ours: None, peers: None }, totals, now);
        let mut connection = Rc::into_inner(connection).expect("nothing else has it yet");
        connection.peer = peer;
        Rc::new(connection)
    }

    /// When the credentials of its request expire.
    pub(super) fn until(&self) -> Option<SystemTime> {
        self.until.get()
    }

    pub(super) fn peer(&self) -> &Rc<str> {
        &self.peer
    }

    /// The IP address of the peer.
    pub(super) fn peer_ip(&self) -> Option<IpAddr> {
        self.ends.peers.map(|address| address.ip())
    }

    /// The address of the peer, for quotas. Addresses that one machine has many of count as one: those of the loopback
    /// interface, and a network of 64 bits in IPv6.
    pub(super) fn origin(&self) -> Option<IpAddr> {
        let address = self.peer_ip()?.to_canonical();
        Some(match address {
            address if address.is_loopback() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
            IpAddr::V4(_) => address,
        })
    }

    pub(super) fn set_who(&self, who: &Rc<Who>, is_known: bool, until: Option<SystemTime>) {
        self.who.replace(Some(who.clone()));
        self.is_known.set(is_known);
        self.until.set(until);
    }

    /// Since when it has been waiting for a request or for the rest of its head.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        match self.phase.get() {
            Phase::Idle(since) | Phase::Head(since) => Some(since),
            Phase::Busy => None,
        }
    }

    /// It is about to be closed.
    pub(super) fn is_cut(&self) -> bool {
        self.wish.get() == CloseRequest::Cut
    }

    /// Whether the client of its request has authenticated.
    pub(super) fn is_known(&self) -> bool {
        self.is_known.get()
    }

    pub(super) fn who(&self) -> Option<Rc<Who>> {
        self.who.borrow().clone()
    }

    /// The local user at the other end; unknown for another machine.
    pub(super) fn peer_user(&self) -> PeerUser {
        if let Some(known) = self.peer_user.get() {
            return known;
        }
        let found = match (self.ends.ours, self.ends.peers) {
            (Some(ours), Some(peers)) if peers.ip().is_loopback() => os::peer_user(ours, peers),
            _ => PeerUser::Unknown,
        };
        self.peer_user.set(Some(found));
        found
    }

    /// The head of a request is complete.
    pub(super) fn begin(&self) {
        self.who.replace(None);
        self.phase.set(Phase::Busy);
    }

    /// The request is complete, with its body.
    pub(super) fn has_request(&self) {
        self.ahead.set(Ahead::Kept);
    }

    /// The answer is complete, and the next request may follow.
    pub(super) fn rest(&self, driver: &Shared) {
        let now = Instant::now();
        self.ahead.set(Ahead::OfRequest);
        self.phase.set(Phase::Idle(now));
        self.pass.replace(None);
        self.is_stream.set(false);
        let mut driver = driver.borrow_mut();
        driver.connection_rests();
        let idle = driver.limits().idle_timeout;
        driver.wake_by(now + idle);
    }

    /// Stores the credentials of the current request.
    pub(super) fn show_pass(&self, credentials: HeaderMap, who: Rc<Who>) -> Rc<Pass> {
        let pass = Rc::new(Pass { credentials, who, until: self.until.get() });
        self.pass.replace(Some(pass.clone()));
        pass
    }

    /// Closes the connection if the credentials of its request are no longer valid.
    pub(super) fn check_pass(&self, auth: &Auth) {
        let is_over = match &*self.pass.borrow() {
            Some(pass) => !pass.is_good(auth),
            None => false,
        };
        if is_over {
            self.cut();
        }
    }

    /// Closes the connection if it has a request in progress without authentication.
    pub(super) fn ask_for_pass(&self) {
        if self.phase.get() == Phase::Busy && self.pass.borrow().is_none() {
            self.cut();
        }
    }

    /// Closes the connection unless it was accepted on a loopback address: from elsewhere authentication is required.
    pub(super) fn ask_for_home(&self) {
        if !self.ends.is_local() {
            self.cut();
        }
    }

    /// When the current phase, or a stalled write, times out.
    pub(super) fn deadline(&self, limits: &Limits) -> Option<Instant> {
        let phase = match self.phase.get() {
            Phase::Idle(since) => Some(since + limits.idle_timeout),
            Phase::Head(since) => Some(since + limits.head_timeout),
            Phase::Busy => None,
        };
        let stalled = self.stalled.get().map(|since| since + limits.write_timeout);
        phase.into_iter().chain(stalled).min()
    }

    /// Adds bytes that are to be sent.
    pub(super) fn add_waiting(&self, bytes: usize) {
        if self.wish.get() != CloseRequest::Cut {
            self.waiting.set(self.waiting.get() + bytes);
            self.totals.unsent.set(self.totals.unsent.get() + bytes);
        }
    }

    /// Subtracts bytes that were sent or dropped.
    pub(super) fn remove_waiting(&self, bytes: usize) {
        // After a cut the count is already zero.
        let bytes = bytes.min(self.waiting.get());
        self.waiting.set(self.waiting.get() - bytes);
        self.totals.unsent.set(self.totals.unsent.get() - bytes);
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.get()
    }

    /// How long the peer has read nothing.
    pub(super) fn stalled_for(&self, now: Instant) -> Option<Duration> {
        self.stalled.get().map(|since| now.saturating_duration_since(since))
    }

    pub(super) fn is_stalled(&self) -> bool {
        self.stalled.get().is_some()
    }

    /// The response of the current request is a stream of events.
    pub(super) fn begin_stream(&self) {
        self.is_stream.set(true);
    }

    /// A request is being read or answered, or its answer is being sent. A stream counts only while a part of it waits to
    /// be sent.
    pub(super) fn is_serving(&self) -> bool {
        let is_quiet_stream = self.is_stream.get() && self.waiting() == 0;
        self.phase.get() == Phase::Busy && !is_quiet_stream || self.is_stalled()
    }

    /// Between two requests, and everything was sent. A part of the next request may have been read.
    pub(super) fn can_be_handed_over(&self) -> bool {
        self.phase.get() != Phase::Busy && !self.is_stalled()
    }

    /// Gives its socket away as soon as its current response is sent, or stays after all.
    pub(super) fn hand_over(&self, wanted: bool) {
        match (self.wish.get(), wanted) {
            (CloseRequest::Stay, true) => self.wish.set(CloseRequest::HandOver),
            (CloseRequest::HandOver, false) => self.wish.set(CloseRequest::Stay),
            _ => {}
        }
        self.wake();
    }

    pub(super) fn close(&self) {
        if matches!(self.wish.get(), CloseRequest::Stay | CloseRequest::HandOver) {
            self.wish.set(CloseRequest::Close);
        }
        self.wake();
    }

    pub(super) fn cut(&self) {
        self.remove_waiting(self.waiting.get());
        self.wish.set(CloseRequest::Cut);
        self.wake();
    }

    fn wake(&self) {
        if let Some(waker) = &*self.waker.borrow() {
            waker.wake_by_ref();
        }
    }

    /// What the connection should do; the task is woken when that changes.
    pub(super) fn poll_wish(&self, cx: &Context<'_>) -> CloseRequest {
        let mut waker = self.waker.borrow_mut();
        if waker.as_ref().is_none_or(|known| !known.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
        self.wish.get()
    }
}

/// Whether credentials still identify the same client. A profile that the client chose itself does not count.
fn is_same(who: &Who, before: &Who) -> bool {
    (&who.name, &who.role) == (&before.name, &before.role) && (who.profile.is_none() || who.profile == before.profile)
}

/// Socket options by which the kernel detects a lost peer, with or without data to send.
pub(super) fn set_options(tcp: &TcpStream, limits: &Limits) {
    // All of them are optional: a system without one of them still has the timeouts of the front.
    let _ = tcp.set_nodelay(true);
    let socket = SockRef::from(tcp);
    let _ = socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(KEEPALIVE_AFTER).with_interval(KEEPALIVE_EVERY).with_retries(KEEPALIVE_TRIES),
    );
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_user_timeout(Some(limits.write_timeout));
    #[cfg(not(target_os = "linux"))]
    let _ = limits;
}

/// Bytes that are read while a request is being answered; more stay in the kernel.
const AHEAD_MAX: usize = 16 << 10;

/// The transport of a connection, and what was read from it too early. hyper reads and writes it as [`Socket`]; the task of the
/// connection looks for its end.
pub(super) struct Peer {
    transport: RefCell<TokioIo<Transport>>,
    /// Read and not used: by the last program of this process, or while a request was being answered.
    unread: RefCell<Bytes>,
    /// Only while `unread` is full.
    disconnects: RefCell<Option<Disconnects>>,
    /// hyper wanted to read while a request was being answered.
    was_refused: Cell<bool>,
    connection: Rc<Connection>,
}

impl Peer {
    pub(super) fn new(transport: Transport, unread: Bytes, connection: Rc<Connection>) -> Rc<Peer> {
        Rc::new(Peer {
            transport: RefCell::new(TokioIo::new(transport)),
            unread: RefCell::new(unread),
            disconnects: RefCell::new(None),
            was_refused: Cell::new(false),
            connection,
        })
    }

    /// The socket itself, if it can be handed over, with the bytes that were read and not used.
    pub(super) fn into_plain(self, read: &[u8]) -> Option<(TcpStream, Bytes)> {
        match self.transport.into_inner().into_inner() {
            Transport::Plain(tcp) => Some((tcp, [read, &self.unread.into_inner()].concat().into())),
            Transport::Tls(_) => None,
        }
    }

    /// Ready when the peer has closed the connection while its request is being answered. hyper does not look for that while
    /// it has bytes of the next request.
    pub(super) fn poll_closed(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut disconnects = self.disconnects.borrow_mut();
        if self.connection.ahead.get() == Ahead::OfRequest {
            *disconnects = None;
            return Poll::Pending;
        }
        let (mut transport, mut unread) = (self.transport.borrow_mut(), self.unread.borrow_mut());
        while unread.len() < AHEAD_MAX {
            let mut space = [MaybeUninit::uninit(); 1 << 10];
            let mut read = ReadBuf::uninit(&mut space);
            let outcome = ready!(Pin::new(transport.inner_mut()).poll_read(cx, &mut read));
            if outcome.is_err() || read.filled().is_empty() {
                return Poll::Ready(());
            }
            *unread = [&unread, read.filled()].concat().into();
        }
        if disconnects.is_none() {
            *disconnects = Disconnects::of(transport.inner().tcp(), &self.connection.totals);
        }
        disconnects.as_ref().map_or(Poll::Pending, |disconnects| disconnects.poll(cx))
    }

    /// True once after the answer to a request, if hyper wanted to read before. It does not try again by itself, and no waker
    /// is registered for bytes that have arrived since.
    pub(super) fn must_read_again(&self) -> bool {
        self.connection.ahead.get() == Ahead::OfRequest && self.was_refused.take()
    }
}

/// How many connections may use a second descriptor to notice a disconnect.
const COPIES_MAX: usize = 64;

/// Notices that the peer has disconnected while bytes of it stay in the kernel. Its descriptor is a copy, so that the
/// transport still finds those bytes: each descriptor has a readiness of its own.
struct Disconnects {
    copy: TcpStream,
    totals: Rc<Totals>,
}

impl Disconnects {
    /// None if too many connections have a copy, or without a free descriptor. Then a disconnect is noticed when something is
    /// written.
    fn of(tcp: &TcpStream, totals: &Rc<Totals>) -> Option<Disconnects> {
        if totals.copies.get() >= COPIES_MAX {
            return None;
        }
        let copy = SockRef::from(tcp).try_clone().ok()?;
        let copy = TcpStream::from_std(copy.into()).ok()?;
        totals.copies.set(totals.copies.get() + 1);
        Some(Disconnects { copy, totals: totals.clone() })
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        while ready!(self.copy.poll_read_ready(cx)).is_ok() {
            let Poll::Ready(Ok(found)) = pin!(self.copy.ready(Interest::READABLE)).poll(cx) else { break };
            if found.is_read_closed() {
                break;
            }
            // More bytes have arrived; "would block" makes tokio wait for the next change.
            let _ = self.copy.try_io(Interest::READABLE, || Err::<(), _>(io::ErrorKind::WouldBlock.into()));
        }
        Poll::Ready(())
    }
}

impl Drop for Disconnects {
    fn drop(&mut self) {
        self.totals.copies.set(self.totals.copies.get() - 1);
    }
}

/// The byte stream of a connection, as hyper uses it.
pub(super) struct Socket {
    peer: Rc<Peer>,
    driver: Shared,
}

impl Socket {
    pub(super) fn new(peer: Rc<Peer>, driver: Shared) -> Socket {
        Socket { peer, driver }
    }

    fn transport(&self) -> RefMut<'_, TokioIo<Transport>> {
        self.peer.transport.borrow_mut()
    }

    /// The first bytes of a request are there.
    fn begin_head(&self) {
        if let Phase::Idle(_) = self.peer.connection.phase.get() {
            let now = Instant::now();
            self.peer.connection.phase.set(Phase::Head(now));
            let mut driver = self.driver.borrow_mut();
            let head = driver.limits().head_timeout;
            driver.wake_by(now + head);
        }
    }

    fn note_write<T>(&self, poll: Poll<T>) -> Poll<T> {
        if poll.is_ready() {
            self.peer.connection.stalled.set(None);
            return poll;
        }
        let now = Instant::now();
        let mut driver = self.driver.borrow_mut();
        if self.peer.connection.stalled.get().is_none() {
            self.peer.connection.stalled.set(Some(now));
            let write = driver.limits().write_timeout;
            driver.wake_by(now + write);
        }
        driver.shed_backlog(now);
        poll
    }
}

impl rt::Read for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut cursor: rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        // The task reads until the request is answered.
        if self.peer.connection.ahead.get() == Ahead::Kept {
            self.peer.was_refused.set(true);
            return Poll::Pending;
        }
        let is_idle = matches!(self.peer.connection.phase.get(), Phase::Idle(_));
        if is_idle && self.driver.borrow_mut().poll_requests_begin(cx).is_pending() {
            return Poll::Pending;
        }
        let mut unread = self.peer.unread.borrow_mut();
        let read = if unread.is_empty() {
            Pin::new(&mut *self.transport()).poll_read(cx, cursor)
        } else {
            let count = unread.len().min(cursor.remaining());
            cursor.put_slice(&unread.split_to(count));
            Poll::Ready(Ok(()))
        };
        if read.is_ready() {
            self.begin_head();
        }
        read
    }
}

impl rt::Write for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut *self.transport()).poll_write(cx, bytes);
        self.note_write(poll)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // With TLS, buffered bytes may not have reached the socket yet.
        match Pin::new(&mut *self.transport()).poll_flush(cx) {
            Poll::Pending => self.note_write(Poll::Pending),
            poll => poll,
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.transport()).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut *self.transport()).poll_write_vectored(cx, pieces);
        self.note_write(poll)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_connections_are_closed_when_authentication_is_turned_off() {
        for (is_local, wish) in [(true, CloseRequest::Stay), (false, CloseRequest::Cut)] {
            let ours = if is_local { "127.0.0.1:1" } else { "192.0.2.1:1" };
            let ends = Ends { ours: ours.parse().ok(), peers: None };
            let connection = Connection::new(ends, Rc::default(), Instant::now());
            connection.ask_for_home();
            assert_eq!(connection.poll_wish(&Context::from_waker(Waker::noop())), wish, "local: {is_local}");
        }
    }

    #[tokio::test]
    async fn connections_with_a_second_descriptor_are_limited() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let totals = Rc::new(Totals::default());
        let mut copies: Vec<Disconnects> = (0..COPIES_MAX).filter_map(|_| Disconnects::of(&tcp, &totals)).collect();
        assert_eq!(copies.len(), COPIES_MAX);
        assert!(Disconnects::of(&tcp, &totals).is_none());
        copies.pop();
        assert!(Disconnects::of(&tcp, &totals).is_some(), "one has ended");
    }
}
