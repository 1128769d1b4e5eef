//! The hub: clients on one side, the relay of their server on the other, and the gateway machine between them. The relay
//! is driven by a task of its own, as in `outlast mcp` without a hub.

pub(crate) mod upgrade;

use std::{
    cell::RefCell,
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use outlast_core::gateway::{Action, Client, Event, Front, Gateway, Link, SharedClients, Who};
use outlast_os::{self as os, BlockingStream, Claim, Listener, Peer, Sink, Source};
use serde_json::{Value, json};
use tokio::{sync::mpsc::Sender, task::JoinHandle};

use super::{
    connection::{Connection, Inbound},
    wire::{FromHub, Hello},
};
use crate::child::{outbox::BYTES_HIGH, timer::Timer};

/// Clients at a time; one more gets a server of its own.
const CLIENTS_MAX: usize = 256;
/// How long a client may take to send its greeting; then it is disconnected.
const GREETING_WAIT: Duration = Duration::from_secs(5);
/// How long the requests of a client that has ended its input may still be answered.
const DRAIN_MAX: Duration = Duration::from_secs(3);
/// How long the last messages to clients may take at the end.
const LAST_MESSAGES_MAX: Duration = Duration::from_secs(1);
/// A client that reads nothing is disconnected when this many bytes wait for it, so that no other client waits.
const OUTBOX_MAX: usize = 64 << 20;
/// Lines of one client, or of the relay, in one turn of the loop, so that no source starves the others.
const LINES_MAX: usize = 256;

/// What is fixed before the hub starts.
pub(crate) struct Plan {
    pub id: String,
    pub name: String,
    pub linger: Duration,
    /// Which clients share it: `directory`, `user`, `equals` or `own`.
    pub scope: &'static str,
    /// Why it is not for all clients.
    pub why: Option<String>,
    pub seed: u64,
}

/// What the relay reports about the hub, in `state` and in the log.
pub(crate) struct HubReport {
    pub state: Rc<RefCell<Value>>,
    pub notes: Sender<String>,
}

pub(crate) struct Hub {
    plan: Plan,
    /// Made with the greeting of the first client, which says what the server is told.
    gateway: Option<Gateway>,
    actions: Vec<Action>,
    listener: Option<Listener>,
    clients: BTreeMap<Client, Seat>,
    next_client: Client,
    relay: Connection,
    link: Option<Link>,
    /// The task of the relay, with its exit code.
    server: Option<JoinHandle<u8>>,
    stops: os::Stops,
    /// The name of the hub, if it has one.
    claim: Option<Rc<Claim>>,
    handover: Handing,
    /// A signal ends the hub and not its clients, which start another one.
    is_killed: bool,
    /// When the hub ends because it has no client.
    idle_until: Option<Instant>,
    ending: Option<Instant>,
    report: HubReport,
    now: Instant,
    timer: Timer,
}

/// What an upgrade in place needs.
#[derive(Default)]
struct Handing {
    /// Requests of clients are not read, so that open ones can end.
    is_held: bool,
    /// Wakes the hub.
    waker: Option<Waker>,
    /// Wakes the relay, which waits until the hub can be saved.
    waiting: Option<Waker>,
}

/// The place of one client.
struct Seat {
    connection: Connection,
    phase: Phase,
    hello: Option<Hello>,
    /// Seconds since 1970.
    since: f64,
}

enum Phase {
    /// Its greeting has not come.
    Greeting {
        until: Instant,
    },
    Serving,
    /// It sends nothing any more, and waits for its last answers.
    Draining {
        until: Instant,
    },
    /// It only gets what is still to be written.
    Leaving {
        until: Instant,
    },
}

impl Seat {
    fn deadline(&self) -> Option<Instant> {
        match self.phase {
            Phase::Greeting { until } | Phase::Draining { until } | Phase::Leaving { until } => Some(until),
            Phase::Serving => None,
        }
    }
}

impl Hub {
    pub(crate) fn new(
        plan: Plan,
        listener: Option<Listener>,
        claim: Option<Rc<Claim>>,
        relay: (Source, Sink),
        stops: os::Stops,
        report: HubReport,
    ) -> Hub {
        Hub::over(plan, listener, claim, Connection::new(relay, b""), stops, report)
    }

    fn over(
        plan: Plan,
        listener: Option<Listener>,
        claim: Option<Rc<Claim>>,
        relay: Connection,
        stops: os::Stops,
        report: HubReport,
    ) -> Hub {
        let now = Instant::now();
        let mut hub = Hub {
            // The client that started it is about to connect; another one may come if it does not.
            idle_until: Some(now + plan.linger.max(GREETING_WAIT)),
            plan,
            gateway: None,
            actions: Vec::new(),
            listener,
            clients: BTreeMap::new(),
            next_client: 1,
            relay,
            link: None,
            server: None,
            stops,
            claim,
            handover: Handing::default(),
            is_killed: false,
            ending: None,
            report,
            now,
            timer: Timer::default(),
        };
        hub.publish();
        hub
    }

    pub(crate) fn claim(&self) -> Option<Rc<Claim>> {
        self.claim.clone()
    }

    /// A client that is connected already.
    pub(crate) fn seat(&mut self, line: BlockingStream) -> std::io::Result<()> {
        let streams = Peer::of(line)?.into_streams()?;
        self.add_seat(streams);
        Ok(())
    }

    /// Runs until the server, which is driven by this task, is over or no client is left.
    pub(crate) async fn run(hub: Rc<RefCell<Hub>>, server: JoinHandle<u8>) {
        hub.borrow_mut().server = Some(server);
        // The relay borrows the hub in an upgrade, between these polls.
        std::future::poll_fn(|cx| hub.borrow_mut().poll(cx)).await;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.handover.began(cx);
        let polled = self.poll_all(cx);
        self.handover.ended();
        polled
    }

    fn poll_all(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            self.now = Instant::now();
            let mut moved = self.poll_relay(cx);
            moved |= self.poll_clients(cx);
            moved |= self.poll_listener(cx);
            moved |= self.flush(cx);
            moved |= self.poll_ends(cx);
            if let Some(until) = self.ending
                && (self.clients.is_empty() || until <= self.now)
            {
                return Poll::Ready(());
            }
            moved |= self.poll_time(cx);
            if !moved {
                return Poll::Pending;
            }
        }
    }

    fn tell(&mut self, event: Event) {
        let Some(gateway) = &mut self.gateway else { return };
        let mut actions = std::mem::take(&mut self.actions);
        gateway.handle_into(event, self.now, &mut actions);
        let (mut link_up, mut is_changed) = (None, false);
        for action in actions.drain(..) {
            match action {
                Action::TellClient { client, message, .. } => self.tell_client(client, message),
                Action::DropClient { client } => self.leave(client),
                Action::Separate { client, why } => {
                    self.tell_client(client, FromHub::Move { why: why.to_owned() }.to_line());
                    self.note(format!("{} gets a server of its own: {why}", self.name_of(client)));
                    is_changed = true;
                }
                Action::Connect { link } => link_up = Some(link),
                Action::TellLink { message, .. } => self.relay.put(message, None),
                Action::Disconnect { .. } => self.relay.close(),
                Action::Note(text) => self.note(text),
                // The relay has diverted what is no message, and records, restarts and caches on its own.
                Action::Divert { .. }
                | Action::Record(_)
                | Action::NotificationRefused(_)
                | Action::Called(_)
                | Action::Keep { .. }
                | Action::Answer { .. }
                | Action::Check(_)
                | Action::DropCheck { .. }
                | Action::Over => {}
            }
        }
        self.actions = actions;
        if is_changed {
            self.publish();
        }
        if let Some(link) = link_up {
            self.link = Some(link);
            self.tell(Event::LinkUp { link, pid: None });
        }
    }

    fn note(&self, text: String) {
        // Above its limit the log lacks a note.
        let _ = self.report.notes.try_send(text);
    }

    // ---- clients -----------------------------------------------------------------------------------------------

    fn poll_listener(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(listener) = &mut self.listener else { return false };
        match listener.poll_accept(cx) {
            Poll::Pending => false,
            Poll::Ready(peer) => {
                if let Ok(streams) = peer.and_then(Peer::into_streams) {
                    self.add_seat(streams);
                }
                true
            }
        }
    }

    fn add_seat(&mut self, streams: (Source, Sink)) {
        let phase = Phase::Greeting { until: self.now + GREETING_WAIT };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let seat = Seat { connection: Connection::new(streams, b""), phase, hello: None, since };
        self.clients.insert(self.next_client, seat);
        self.next_client += 1;
    }

    fn poll_clients(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        // Freed room wakes us.
        if !self.relay.outbox.is_below(BYTES_HIGH) {
            return false;
        }
        for client in self.clients.keys().copied().collect::<Vec<_>>() {
            for _ in 0..LINES_MAX {
                let is_held = self.is_held();
                let Some(seat) = self.clients.get_mut(&client) else { break };
                if is_held && matches!(seat.phase, Phase::Serving) {
                    break;
                }
                let Poll::Ready(heard) = seat.connection.poll_line(cx) else { break };
                moved = true;
                match (&seat.phase, heard) {
                    (Phase::Greeting { .. }, Inbound::Line(line)) => self.greeted(client, &line),
                    (Phase::Serving, Inbound::Line(message)) => self.tell(Event::ClientSaid { client, message }),
                    (Phase::Serving, Inbound::Ended) => {
                        seat.phase = Phase::Draining { until: self.now + DRAIN_MAX };
                    }
                    (Phase::Draining { .. } | Phase::Leaving { .. }, Inbound::Line(_)) => {}
                    (Phase::Leaving { .. } | Phase::Draining { .. }, Inbound::Ended) => {}
                    (_, Inbound::Ended | Inbound::TooLong) => self.remove(client),
                }
            }
        }
        moved
    }

    fn greeted(&mut self, client: Client, line: &[u8]) {
        // A client that comes too late starts the next hub.
        let is_open = self.ending.is_none() && !self.is_killed && !self.relay.is_closed();
        let hello = Hello::read(line).filter(|_| is_open);
        let Some(hello) = hello else { return self.remove(client) };
        if let Err(apart) = self.admit(&hello) {
            self.tell_client(client, apart.to_line());
            return self.leave(client);
        }
        if self.gateway.is_none() {
            let told = SharedClients {
                capabilities: hello.capabilities.clone(),
                info: hello.info.clone(),
                version: hello.version.clone(),
            };
            self.gateway = Some(Gateway::of_shared_server(&self.plan.name, told, self.plan.seed));
            // Opens the link.
            self.tell(Event::TimePassed);
        }
        let welcome = FromHub::Welcome { id: self.plan.id.clone(), pid: std::process::id() };
        self.tell_client(client, welcome.to_line());
        let Some(seat) = self.clients.get_mut(&client) else { return };
        seat.phase = Phase::Serving;
        seat.hello = Some(hello);
        self.idle_until = None;
        self.note(format!("{} joined", self.name_of(client)));
        let who = Who { name: client.to_string(), role: None, profile: None };
        self.tell(Event::ClientCame { client, front: Front::Lines, who });
        self.publish();
    }

    fn admit(&self, hello: &Hello) -> Result<(), FromHub> {
        let apart = |why: &str, with_equals| FromHub::Apart { why: why.to_owned(), with_equals };
        if self.clients.values().filter(|seat| matches!(seat.phase, Phase::Serving)).count() >= CLIENTS_MAX {
            return Err(apart("the server has too many clients", false));
        }
        let gateway = self.gateway.as_ref();
        let admitted = gateway.map_or(Ok(()), |gateway| gateway.admit(&hello.capabilities));
        admitted.map_err(|refused| apart(refused.why, refused.with_equals))
    }

    fn tell_client(&mut self, client: Client, line: Bytes) {
        let Some(seat) = self.clients.get_mut(&client).filter(|seat| !seat.connection.is_closed()) else { return };
        seat.connection.put(line, None);
        if !seat.connection.outbox.is_below(OUTBOX_MAX) {
            self.note(format!("{} does not read and is disconnected", self.name_of(client)));
            self.remove(client);
        }
    }

    /// Its last messages are written, and then it is disconnected.
    fn leave(&mut self, client: Client) {
        if let Some(seat) = self.clients.get_mut(&client) {
            seat.phase = Phase::Leaving { until: self.now + LAST_MESSAGES_MAX };
            seat.connection.close();
        }
    }

    fn remove(&mut self, client: Client) {
        let name = self.name_of(client);
        let Some(seat) = self.clients.remove(&client) else { return };
        if seat.hello.is_none() {
            return;
        }
        self.note(format!("{name} left"));
        self.tell(Event::ClientLeft { client });
        if self.clients.values().all(|seat| seat.hello.is_none()) {
            // What such a server knows belongs to the client that left.
            let is_exclusive = self.gateway.as_ref().is_some_and(|gateway| gateway.exclusive().is_some());
            let linger = if is_exclusive || self.listener.is_none() { Duration::ZERO } else { self.plan.linger };
            self.idle_until = Some(self.now + linger);
        }
        self.publish();
    }

    fn name_of(&self, client: Client) -> String {
        let hello = self.clients.get(&client).and_then(|seat| seat.hello.as_ref());
        let Some(hello) = hello else { return format!("client {client}") };
        let info: Value = hello.info.as_deref().and_then(|info| serde_json::from_str(info).ok()).unwrap_or_default();
        let name = info["name"].as_str().unwrap_or("a client");
        format!("{name} (pid {})", hello.pid)
    }

    // ---- the relay ---------------------------------------------------------------------------------------------

    fn poll_relay(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        for _ in 0..LINES_MAX {
            // With one client its speed counts; beside others a slow client is disconnected.
            let is_slow = self.clients.len() == 1
                && self.clients.values().any(|seat| !seat.connection.outbox.is_below(BYTES_HIGH));
            let Some(link) = self.link.filter(|_| !is_slow) else { break };
            let Poll::Ready(heard) = self.relay.poll_line(cx) else { break };
            moved = true;
            match heard {
                Inbound::Line(message) => self.tell(Event::LinkSaid { link, message }),
                // What is still open is answered by the clients, which see the end of their hub.
                Inbound::TooLong | Inbound::Ended => {
                    self.link = None;
                    self.relay.close_now();
                }
            }
        }
        moved
    }

    fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        let was_high = !self.relay.outbox.is_below(BYTES_HIGH);
        let mut moved = self.relay.flush(cx).is_err();
        moved |= was_high && self.relay.outbox.is_below(BYTES_HIGH);
        let mut gone = Vec::new();
        for (client, seat) in &mut self.clients {
            let was_high = !seat.connection.outbox.is_below(BYTES_HIGH);
            if seat.connection.flush(cx).is_err() || seat.connection.is_closed() {
                gone.push(*client);
            }
            moved |= was_high && seat.connection.outbox.is_below(BYTES_HIGH);
        }
        moved |= !gone.is_empty();
        gone.into_iter().for_each(|client| self.remove(client));
        moved
    }

    // ---- ends and time -----------------------------------------------------------------------------------------

    fn poll_ends(&mut self, cx: &mut Context<'_>) -> bool {
        if self.stops.poll_next(cx).is_ready() {
            // The relay has its own copy of the signal, and ends the server.
            self.is_killed = true;
            self.listener = None;
            return true;
        }
        if self.ending.is_none()
            && let Some(Poll::Ready(code)) = self.server.as_mut().map(|server| Pin::new(server).poll(cx))
        {
            self.listener = None;
            self.ending = Some(self.now + LAST_MESSAGES_MAX);
            for client in self.clients.keys().copied().collect::<Vec<_>>() {
                if !self.is_killed {
                    self.tell_client(client, FromHub::End { code: code.as_ref().copied().unwrap_or(1) }.to_line());
                }
                self.leave(client);
            }
            return true;
        }
        false
    }

    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        self.now = Instant::now();
        let moved = self.end_drains();
        let phases = self.clients.values().filter_map(Seat::deadline);
        let idle = self.idle_until.filter(|_| !self.relay.is_closed());
        let gateway = self.gateway.as_ref().and_then(Gateway::deadline);
        let deadline = phases.chain([idle, self.ending, gateway].into_iter().flatten()).min();
        if !self.timer.poll(deadline, self.now, cx) {
            return moved;
        }
        self.now = Instant::now();
        self.time_passed();
        true
    }

    fn time_passed(&mut self) {
        self.tell(Event::TimePassed);
        let is_late = |seat: &Seat| seat.deadline().is_some_and(|until| until <= self.now);
        let late: Vec<Client> =
            self.clients.iter().filter(|(_, seat)| is_late(seat)).map(|(client, _)| *client).collect();
        late.into_iter().for_each(|client| self.remove(client));
        if self.idle_until.is_some_and(|until| until <= self.now) {
            // The relay ends as when its client leaves, and with it the hub.
            self.listener = None;
            self.relay.close_now();
        }
    }

    /// Clients that have ended their input and wait for no answer are disconnected.
    fn end_drains(&mut self) -> bool {
        let Some(gateway) = &self.gateway else { return false };
        let is_over = |(client, seat): &(&Client, &Seat)| {
            matches!(seat.phase, Phase::Draining { .. }) && gateway.in_flight(**client) == 0
        };
        let over: Vec<Client> = self.clients.iter().filter(is_over).map(|(client, _)| *client).collect();
        for client in &over {
            self.leave(*client);
        }
        !over.is_empty()
    }

    /// What `ps` and `state` show.
    fn publish(&mut self) {
        let clients = self.clients.values().filter_map(|seat| Some((seat.hello.as_ref()?, seat.since)));
        let clients: Vec<Value> = clients
            .map(|(hello, since)| {
                let info: Value =
                    hello.info.as_deref().and_then(|info| serde_json::from_str(info).ok()).unwrap_or_default();
                json!({
                    "name": info["name"].as_str(),
                    "version": info["version"].as_str(),
                    "pid": hello.pid,
                    "parent_pid": hello.parent,
                    "cwd": hello.cwd.to_string_lossy(),
                    "since": since,
                })
            })
            .collect();
        let exclusive = self.gateway.as_ref().and_then(Gateway::exclusive);
        let why = self.plan.why.as_deref().or(exclusive);
        let linger = self.plan.linger.as_secs_f64();
        *self.report.state.borrow_mut() = json!({
            "share": {"scope": self.plan.scope, "why_not_all": why, "linger_s": linger, "clients": clients},
        });
    }
}
