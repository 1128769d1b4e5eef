//! The thin client: a relay between the client on stdin and stdout, and the hub of its server. It keeps the client's
//! connection when the hub ends, joins the next one, and repeats the client's handshake there.

pub(crate) mod upgrade;

use std::{
    collections::{BTreeMap, VecDeque},
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use outlast_control::registry::Program;
use outlast_core::{
    exit::{Exit, How},
    json::Raw,
    mcp::meta,
    message::{self, Message, pick},
    relay::{Action, ClientEnd, Event, Origin, Relay, Settings},
};
use outlast_os::{
    self as os, Peer,
    offload::{Task, offload},
};

use super::{
    connection::{Connection, Inbound},
    join::{Joined, Joining, Target, join},
    place::Hubs,
    wire::{self, FromHub, Hello},
};
use crate::{
    child::{
        own_streams::{ClientEvent, OwnStreams},
        timer::Timer,
    },
    upgrade::{own_program, requests::Upgrades},
};

/// How long a hub may take to finish the requests of a client that leaves it.
const LEAVE_MAX: Duration = Duration::from_secs(4);
/// How long the last messages to the client may take at the end.
const LAST_MESSAGES_MAX: Duration = Duration::from_secs(1);
/// Lines of one hub in one turn of the loop, so that no source starves the others.
const LINES_MAX: usize = 256;
/// The ticket of a move to another hub, which no caller waits for.
const MOVE: u64 = 0;

/// Everything around one client of a shared server.
pub(crate) struct ThinClient {
    relay: Relay,
    actions: Vec<Action>,
    place: Hubs,
    /// Known from the client's first message.
    joining: Option<Joining>,
    /// Why this client was sent away from the shared server. Then each hub that it joins is its own.
    moved: Option<String>,
    starting: Option<Task<Result<Joined, String>>>,
    hubs: BTreeMap<u32, Hub>,
    next_generation: u32,
    stops: os::Stops,
    upgrades: Upgrades,
    /// The file that this process was started from; its name can be another file's later.
    program: Option<Program>,
    client: OwnStreams,
    /// What the client said before the first hub was joined.
    waiting: VecDeque<ClientEvent>,
    /// The client is not heard until then: a client that sends everything at once and closes stdin still gets its answers.
    awaits_first: bool,
    /// The hub said that the server is over.
    code: Option<u8>,
    ending: Option<(u8, Instant)>,
    now: Instant,
    timer: Timer,
    /// A hub was joined, so the memory of the start-up code can be returned.
    has_started: bool,
}

/// A hub that was joined.
struct Hub {
    id: String,
    connection: Connection,
    /// It is being left for this reason, until this time.
    leaving: Option<(How, Instant)>,
    /// How many bytes the relay was last told to wait for it, once the limit was reached.
    queued: Option<usize>,
}

impl ThinClient {
    pub(crate) fn new(settings: Settings, place: Hubs, stops: os::Stops, client: OwnStreams) -> ThinClient {
        ThinClient {
            relay: Relay::new(settings),
            actions: Vec::new(),
            place,
            joining: None,
            moved: None,
            starting: None,
            hubs: BTreeMap::new(),
            next_generation: 1,
            stops,
            upgrades: Upgrades::default(),
            program: own_program(),
            client,
            waiting: VecDeque::new(),
            awaits_first: true,
            code: None,
            ending: None,
            now: Instant::now(),
            timer: Timer::default(),
            has_started: false,
        }
    }

    /// Runs until the conversation is over, and returns the exit code.
    pub(crate) async fn run(mut self) -> u8 {
        std::future::poll_fn(|cx| self.poll(cx)).await
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<u8> {
        loop {
            self.now = Instant::now();
            let mut moved = self.poll_stops(cx);
            moved |= self.poll_start(cx);
            moved |= self.poll_hubs(cx);
            moved |= self.poll_client(cx);
            moved |= self.flush(cx);
            if let Some((code, until)) = self.ending {
                let is_quiet = self.client.queued() == 0 && self.hubs.is_empty();
                if is_quiet || until <= Instant::now() {
                    return Poll::Ready(self.code.unwrap_or(code));
                }
            }
            moved |= self.poll_time(cx);
            moved |= self.poll_upgrade(cx);
            if !moved {
                if std::mem::take(&mut self.has_started) {
                    os::give_back_code();
                }
                return Poll::Pending;
            }
        }
    }

    fn tell(&mut self, event: Event) {
        let mut actions = std::mem::take(&mut self.actions);
        self.relay.handle(event, self.now, &mut actions);
        let mut later = Vec::new();
        for action in actions.drain(..) {
            later.extend(self.act(action));
        }
        self.actions = actions;
        later.into_iter().for_each(|event| self.tell(event));
    }

    /// Some actions are answered at once.
    fn act(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::TellClient(line) => self.client.put(line),
            Action::TellServer { generation, line, mark } => {
                if let Some(hub) = self.hubs.get_mut(&generation) {
                    hub.connection.put(line, mark);
                }
            }
            Action::TakeBack(generation) => {
                let hub = self.hubs.get_mut(&generation);
                let unsent = hub.map(|hub| hub.connection.outbox.take_back()).unwrap_or_default();
                return Some(Event::TakenBack { generation, unsent });
            }
            Action::CloseStdin(generation) => {
                self.hubs.get_mut(&generation).into_iter().for_each(|hub| hub.connection.close_now());
            }
            Action::Start => self.start(),
            Action::Stop { generation, how } => {
                if let Some(hub) = self.hubs.get_mut(&generation) {
                    hub.connection.close();
                    hub.leaving.get_or_insert((how, self.now + LEAVE_MAX));
                }
            }
            // The hub has the marker, the cache, the build and the log.
            Action::WriteMarker { .. } => return Some(Event::MarkerWritten(Ok(String::new()))),
            Action::MarkReady(_) => self.has_started = true,
            Action::ReadCache(_)
            | Action::SaveCache { .. }
            | Action::Build
            | Action::StopBuild
            | Action::ReadMarker(_)
            | Action::Record(_)
            | Action::Divert { .. }
            | Action::Answer { .. } => {}
            Action::End(code) => self.ending = Some((code, self.now + LAST_MESSAGES_MAX)),
        }
        None
    }

    // ---- hubs --------------------------------------------------------------------------------------------------

    fn start(&mut self) {
        if let Some(joining) = self.joining.clone() {
            let target = self.moved.clone().map_or(Target::Shared, Target::Own);
            self.starting = Some(offload(move || join(&joining, target)));
        }
    }

    fn poll_start(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(starting) = &mut self.starting else { return false };
        let Poll::Ready(started) = Pin::new(starting).poll(cx) else { return false };
        self.starting = None;
        let joined = started.map_err(|error| error.to_string()).and_then(|joined| joined).and_then(|joined| {
            let streams = Peer::of(joined.line).and_then(Peer::into_streams).map_err(|error| error.to_string())?;
            let connection = Connection::new(streams, &joined.early);
            Ok((Hub { id: joined.id, connection, leaving: None, queued: None }, joined.pid, joined.target))
        });
        match joined {
            Ok((hub, pid, target)) => {
                let generation = self.next_generation;
                self.next_generation += 1;
                self.say_joined(&hub.id, pid, &target);
                self.hubs.insert(generation, hub);
                let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
                self.tell(Event::ServerStarted { generation, pid, unix });
            }
            Err(why) => {
                os::say(&format!("[outlast] the shared server cannot be used: {why}"));
                self.tell(Event::StartFailed(why));
            }
        }
        self.awaits_first = false;
        true
    }

    fn say_joined(&self, id: &str, pid: u32, target: &Target) {
        let how = match target {
            Target::Shared => "shares the server of".to_owned(),
            Target::Equals(why) => format!("does not share its server with all clients ({why}), and uses"),
            Target::Own(why) => format!("has a server of its own ({why}):"),
        };
        os::say(&format!("[outlast] this client {how} {id} (pid {pid}); `outlast logs {id}` shows the log"));
    }

    fn poll_hubs(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        for generation in self.hubs.keys().copied().collect::<Vec<_>>() {
            for _ in 0..LINES_MAX {
                let Some(hub) = self.hubs.get_mut(&generation) else { break };
                // Freed room wakes us.
                if !self.client.is_low() {
                    break;
                }
                let Poll::Ready(heard) = hub.connection.poll_line(cx) else { break };
                moved = true;
                match heard {
                    Inbound::Line(line) if wire::is_ours(&line) => self.hub_said(generation, &line),
                    Inbound::Line(line) => self.tell(Event::ServerSaid(generation, line)),
                    Inbound::TooLong => self.hub_gone(generation, How::LineTooLong),
                    Inbound::Ended => self.hub_gone(generation, How::Lost("its hub ended".to_owned())),
                }
            }
        }
        moved
    }

    fn hub_said(&mut self, generation: u32, line: &[u8]) {
        match FromHub::read(line) {
            Some(FromHub::Move { why }) => {
                // The next hub is joined beside this one, which finishes the open requests.
                self.moved = Some(why.clone());
                self.tell(Event::RestartAsked { ticket: MOVE, origin: Origin::Control, reason: why, at_once: false });
            }
            Some(FromHub::End { code }) => {
                self.code = Some(code);
                self.hub_gone(generation, How::Exited(Exit::Code(0)));
                // Also if the server was not ready, and would be started again.
                self.client.stop_reading();
                self.tell(Event::ClientEnded(ClientEnd::Closed));
            }
            Some(FromHub::Upgrade { program }) => self.ask_upgrade(Some(program)),
            Some(FromHub::Welcome { .. } | FromHub::Apart { .. }) | None => {}
        }
    }

    fn hub_gone(&mut self, generation: u32, how: How) {
        let Some(mut hub) = self.hubs.remove(&generation) else { return };
        let how = hub.leaving.take().map_or(how, |(how, _)| how);
        let unsent = hub.connection.outbox.unsent();
        self.tell(Event::ServerWentDown { generation, how, unsent });
    }

    // ---- the client --------------------------------------------------------------------------------------------

    fn poll_client(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        if self.joining.is_none() || !self.awaits_first {
            moved = self.client.poll_input(self.relay.reads_client(), cx);
        }
        moved | self.hear_client()
    }

    fn hear_client(&mut self) -> bool {
        let mut moved = false;
        while let Some(event) = self.client.next_event() {
            self.waiting.push_back(event);
            moved = true;
        }
        if let (None, Some(first)) = (&self.joining, self.waiting.front()) {
            let first = match first {
                ClientEvent::Said(line) => Some(hello(line)),
                ClientEvent::SaidTooMuch(_) => Some(hello(b"")),
                ClientEvent::Ended | ClientEvent::Broken => None,
            };
            match first {
                Some(hello) => self.greet(hello),
                // There is nothing to answer, and no hub to leave.
                None => self.ending = Some((0, self.now)),
            }
        }
        while !self.awaits_first
            && let Some(event) = self.waiting.pop_front()
        {
            moved = true;
            self.tell(match event {
                ClientEvent::Said(line) => Event::ClientSaid(line),
                ClientEvent::SaidTooMuch(start) => Event::ClientSaidTooMuch(start),
                ClientEvent::Ended => Event::ClientEnded(ClientEnd::Closed),
                ClientEvent::Broken => Event::ClientEnded(ClientEnd::Broken),
            });
        }
        moved
    }

    /// The first message says which hub the client can use.
    fn greet(&mut self, hello: Hello) {
        let (place, args) = (self.place.clone(), std::env::args_os().collect());
        self.joining = Some(Joining { place, hello, args });
        self.start();
    }

    fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = self.client.flush(cx) | self.hear_client();
        for generation in self.hubs.keys().copied().collect::<Vec<_>>() {
            let Some(hub) = self.hubs.get_mut(&generation) else { continue };
            // What it still said is read first; then its end is reported.
            moved |= hub.connection.flush(cx).is_err();
            let queued = Some(hub.connection.outbox.bytes()).filter(|bytes| *bytes >= self.relay.queued_bytes_max());
            if queued != hub.queued {
                hub.queued = queued;
                let bytes = hub.connection.outbox.bytes();
                self.tell(Event::ServerQueue { generation, bytes });
                moved = true;
            }
        }
        moved
    }

    fn poll_stops(&mut self, cx: &mut Context<'_>) -> bool {
        let Poll::Ready(_) = self.stops.poll_next(cx) else { return false };
        self.client.stop_reading();
        self.awaits_first = false;
        self.tell(Event::ClientEnded(ClientEnd::Closed));
        true
    }

    // ---- time --------------------------------------------------------------------------------------------------

    fn poll_time(&mut self, cx: &mut Context<'_>) -> bool {
        let leaving = self.hubs.values().filter_map(|hub| hub.leaving.as_ref()).map(|(_, until)| *until);
        let ending = self.ending.map(|(_, until)| until);
        let others = [self.relay.deadline(), ending, self.upgrades.machine.deadline()].into_iter().flatten();
        self.now = Instant::now();
        if !self.timer.poll(leaving.chain(others).min(), self.now, cx) {
            return false;
        }
        self.now = Instant::now();
        let is_late = |hub: &Hub| hub.leaving.as_ref().is_some_and(|(_, until)| *until <= self.now);
        let late: Vec<u32> = self.hubs.iter().filter(|(_, hub)| is_late(hub)).map(|(number, _)| *number).collect();
        late.into_iter().for_each(|generation| self.hub_gone(generation, How::Stopped));
        self.tell(Event::TimePassed);
        true
    }
}

/// What the client's first message declares, in either era.
fn hello(said: &[u8]) -> Hello {
    let mut hello = Hello {
        pid: std::process::id(),
        parent: std::os::unix::process::parent_id(),
        cwd: super::join::here(),
        capabilities: "{}".to_owned(),
        info: None,
        version: None,
    };
    if let Ok(Message::Request { params, .. }) = message::parse(said) {
        let in_meta = params.meta().and_then(|meta| pick(meta, [meta::CLIENT_CAPABILITIES, meta::CLIENT_INFO]));
        let [capabilities, info] = in_meta.unwrap_or_default();
        let text = |raw: Raw<'_>| raw.get().replace(['\n', '\r'], " ");
        if let Some(capabilities) = params.capabilities().or(capabilities) {
            hello.capabilities = text(capabilities);
        }
        hello.info = params.client_info().or(info).map(text);
        hello.version = params.protocol_version().and_then(Raw::text);
    }
    hello
}
