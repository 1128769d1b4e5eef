//! One connection, as the house sees it: what it is at, since when, and how it is told to go.

use std::{
    cell::{Cell, RefCell},
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant, SystemTime},
};

use hyper::{HeaderMap, rt};
use hyper_util::rt::TokioIo;
use outlast_core::gateway::Who;
use socket2::TcpKeepalive;
use tokio::net::TcpStream;

use super::{Auth, Limits, house::Shared, tls::Transport};
use crate::os::{self, PeerUser};

/// A connection on which nothing was heard for so long is asked by the kernel whether it is still there.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(30);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEPALIVE_TRIES: u32 = 3;

/// What a connection is at. Only `Busy` may last: there the answer is ours to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Between two requests, or before the first.
    Idle(Instant),
    /// A request has begun and its head is not whole.
    Head(Instant),
    Busy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    Stay,
    /// After the answer that is being given.
    Close,
    /// At once.
    Cut,
}

#[derive(Debug)]
pub struct Line {
    ends: Ends,
    /// The other end, for records.
    peer: Rc<str>,
    /// Whose the other end is; asked for once.
    peer_user: Cell<Option<PeerUser>>,
    /// Who sent the request that is being answered, if that was found out.
    who: RefCell<Option<Rc<Who>>>,
    /// It proved that.
    is_known: Cell<bool>,
    /// When its credentials expire.
    until: Cell<Option<SystemTime>>,
    phase: Cell<Phase>,
    /// What we have to say is not taken.
    stalled: Cell<Option<Instant>>,
    wish: Cell<Wish>,
    waker: RefCell<Option<Waker>>,
    /// By what right the request that is being answered came.
    pass: RefCell<Option<Rc<Pass>>>,
    /// Bytes of responses that it has not taken yet; they are part of the backlog.
    waiting: Cell<usize>,
    backlog: Rc<Backlog>,
}

/// Bytes of responses that all connections together have not taken yet.
#[derive(Debug, Default)]
pub struct Backlog(Cell<usize>);

impl Backlog {
    pub fn bytes(&self) -> usize {
        self.0.get()
    }
}

/// The two addresses of a connection; unknown of one that was lost before we could ask.
#[derive(Debug, Clone, Copy)]
pub struct Ends {
    pub ours: Option<SocketAddr>,
    pub peers: Option<SocketAddr>,
}

impl Ends {
    pub fn of(tcp: &TcpStream) -> Ends {
        Ends { ours: tcp.local_addr().ok(), peers: tcp.peer_addr().ok() }
    }

    /// It came to an address of this machine that no other one can reach.
    fn is_local(self) -> bool {
        self.ours.is_some_and(|address| address.ip().is_loopback())
    }
}

/// An answer may take long, and the right to it may end before.
#[derive(Debug)]
pub struct Pass {
    pub credentials: HeaderMap,
    pub who: Rc<Who>,
    /// When the credentials expire.
    pub until: Option<SystemTime>,
}

impl Pass {
    /// Whether the credentials still stand for the same client.
    pub fn is_good(&self, auth: &Auth) -> bool {
        auth(&self.credentials).is_ok_and(|found| is_same(&found.who, &self.who))
    }
}

impl Line {
    pub fn new(ends: Ends, backlog: Rc<Backlog>, now: Instant) -> Rc<Line> {
        Rc::new(Line {
            ends,
            peer: ends.peers.map_or_else(String::new, |peer| peer.to_string()).into(),
            peer_user: Cell::new(None),
            who: RefCell::new(None),
            is_known: Cell::new(false),
            until: Cell::new(None),
            waiting: Cell::new(0),
            backlog,
            phase: Cell::new(Phase::Idle(now)),
            stalled: Cell::new(None),
            wish: Cell::new(Wish::Stay),
            waker: RefCell::new(None),
            pass: RefCell::new(None),
        })
    }

    pub fn peer(&self) -> &Rc<str> {
        &self.peer
    }

    /// The machine at the other end.
    pub fn peer_ip(&self) -> Option<IpAddr> {
        self.ends.peers.map(|address| address.ip())
    }

    pub fn set_who(&self, who: &Rc<Who>, is_known: bool, until: Option<SystemTime>) {
        self.who.replace(Some(who.clone()));
        self.is_known.set(is_known);
        self.until.set(until);
    }

    /// Since when it is between two requests, or before the first.
    pub fn idle_since(&self) -> Option<Instant> {
        match self.phase.get() {
            Phase::Idle(since) => Some(since),
            Phase::Head(_) | Phase::Busy => None,
        }
    }

    /// Whether the sender of its request proved who it is.
    pub fn is_known(&self) -> bool {
        self.is_known.get()
    }

    pub fn who(&self) -> Option<Rc<Who>> {
        self.who.borrow().clone()
    }

    /// The local user at the other end. From another machine it is unknown.
    pub fn peer_user(&self) -> PeerUser {
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

    /// A request is whole.
    pub fn begin(&self) {
        self.who.replace(None);
        self.phase.set(Phase::Busy);
    }

    /// Its answer is given, and the next request may come.
    pub fn rest(&self, house: &Shared) {
        let now = Instant::now();
        self.phase.set(Phase::Idle(now));
        self.pass.replace(None);
        let mut house = house.borrow_mut();
        let idle = house.limits.idle_timeout;
        house.want(now + idle);
    }

    /// The request is this one's, by these headers.
    pub fn show_pass(&self, credentials: HeaderMap, who: Rc<Who>) -> Rc<Pass> {
        let pass = Rc::new(Pass { credentials, who, until: self.until.get() });
        self.pass.replace(Some(pass.clone()));
        pass
    }

    /// Cut off, if the right by which its request came has ended.
    pub fn check_pass(&self, auth: &Auth) {
        let is_over = match &*self.pass.borrow() {
            Some(pass) => !pass.is_good(auth),
            None => false,
        };
        if is_over {
            self.cut();
        }
    }

    /// Cut off, if it is being answered and nobody asked who it is.
    pub fn ask_for_pass(&self) {
        if self.phase.get() == Phase::Busy && self.pass.borrow().is_none() {
            self.cut();
        }
    }

    /// Cut off, if only those who prove who they are may come from there.
    pub fn ask_for_home(&self) {
        if !self.ends.is_local() {
            self.cut();
        }
    }

    /// When it has been at the same thing for too long.
    pub fn deadline(&self, limits: &Limits) -> Option<Instant> {
        let phase = match self.phase.get() {
            Phase::Idle(since) => Some(since + limits.idle_timeout),
            Phase::Head(since) => Some(since + limits.head_timeout),
            Phase::Busy => None,
        };
        let stalled = self.stalled.get().map(|since| since + limits.write_timeout);
        phase.into_iter().chain(stalled).min()
    }

    /// It has so much more to take.
    pub fn add_waiting(&self, bytes: usize) {
        if self.wish.get() != Wish::Cut {
            self.waiting.set(self.waiting.get() + bytes);
            self.backlog.0.set(self.backlog.0.get() + bytes);
        }
    }

    /// It took so much, or will never get it.
    pub fn remove_waiting(&self, bytes: usize) {
        // What it had was taken off when it was cut.
        let bytes = bytes.min(self.waiting.get());
        self.waiting.set(self.waiting.get() - bytes);
        self.backlog.0.set(self.backlog.0.get() - bytes);
    }

    pub fn waiting(&self) -> usize {
        self.waiting.get()
    }

    /// How long it has taken nothing.
    pub fn stalled_for(&self, now: Instant) -> Option<Duration> {
        self.stalled.get().map(|since| now.saturating_duration_since(since))
    }

    pub fn is_stalled(&self) -> bool {
        self.stalled.get().is_some()
    }

    pub fn close(&self) {
        if self.wish.get() == Wish::Stay {
            self.wish.set(Wish::Close);
        }
        self.wake();
    }

    pub fn cut(&self) {
        self.remove_waiting(self.waiting.get());
        self.wish.set(Wish::Cut);
        self.wake();
    }

    fn wake(&self) {
        if let Some(waker) = &*self.waker.borrow() {
            waker.wake_by_ref();
        }
    }

    /// What the connection is to do; whoever asks is woken when that changes.
    pub fn poll_wish(&self, cx: &Context<'_>) -> Wish {
        let mut waker = self.waker.borrow_mut();
        if waker.as_ref().is_none_or(|known| !known.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
        self.wish.get()
    }
}

/// Whether credentials still stand for the same client. A profile that the client chose itself is none of theirs.
fn is_same(who: &Who, before: &Who) -> bool {
    (&who.name, &who.role) == (&before.name, &before.role) && (who.profile.is_none() || who.profile == before.profile)
}

/// A client that vanished is noticed by the kernel, whether we have something to say to it or not.
pub fn set_options(tcp: &TcpStream, limits: &Limits) {
    // Each is a help and not a need: a system without one of them still has our own limits.
    let _ = tcp.set_nodelay(true);
    let socket = socket2::SockRef::from(tcp);
    let _ = socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(KEEPALIVE_AFTER).with_interval(KEEPALIVE_EVERY).with_retries(KEEPALIVE_TRIES),
    );
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_user_timeout(Some(limits.write_timeout));
    #[cfg(not(target_os = "linux"))]
    let _ = limits;
}

/// The bytes of a connection.
pub struct Socket {
    transport: TokioIo<Transport>,
    line: Rc<Line>,
    house: Shared,
}

impl Socket {
    pub fn new(transport: Transport, line: Rc<Line>, house: Shared) -> Socket {
        Socket { transport: TokioIo::new(transport), line, house }
    }

    fn note_write<T>(&self, poll: Poll<T>) -> Poll<T> {
        if poll.is_ready() {
            self.line.stalled.set(None);
            return poll;
        }
        let now = Instant::now();
        let mut house = self.house.borrow_mut();
        if self.line.stalled.get().is_none() {
            self.line.stalled.set(Some(now));
            let write = house.limits.write_timeout;
            house.want(now + write);
        }
        house.shed_backlog(now);
        poll
    }
}

impl rt::Read for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        cursor: rt::ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.transport).poll_read(cx, cursor);
        if read.is_ready() && matches!(self.line.phase.get(), Phase::Idle(_)) {
            let now = Instant::now();
            self.line.phase.set(Phase::Head(now));
            let mut house = self.house.borrow_mut();
            let head = house.limits.head_timeout;
            house.want(now + head);
        }
        read
    }
}

impl rt::Write for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.transport).poll_write(cx, bytes);
        self.note_write(poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // With TLS bytes may have been taken that the socket has not.
        match Pin::new(&mut self.transport).poll_flush(cx) {
            Poll::Pending => self.note_write(Poll::Pending),
            poll => poll,
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.transport).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.transport).poll_write_vectored(cx, pieces);
        self.note_write(poll)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_came_from_afar_goes_when_nobody_is_asked_any_more() {
        for (is_local, wish) in [(true, Wish::Stay), (false, Wish::Cut)] {
            let ours = if is_local { "127.0.0.1:1" } else { "192.0.2.1:1" };
            let ends = Ends { ours: ours.parse().ok(), peers: None };
            let line = Line::new(ends, Rc::default(), Instant::now());
            line.ask_for_home();
            assert_eq!(line.poll_wish(&Context::from_waker(Waker::noop())), wish, "local: {is_local}");
        }
    }
}
