//! `outlast gateway` as a process: the gateway machine with its backend processes, a client on stdin or the HTTP front.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::{
    exit::{Exit, How},
    front::{self, HttpFront},
    gateway::{Action, Client, Event, Fit, Front, Gateway, Limits, Link, Outcome, Pattern, Rate, Rates, Settings, Who},
    life::Grace,
    message::{self, Message, Outline},
};

use super::{Shared, What};
use crate::{
    Dice,
    front::limits,
    gateway::{AllFit, backend},
    http::{Response, hash},
    kernel::{Child, Heard, Lines, Outbox, Pid, Read},
    ms,
};

/// The client on stdin.
const STDIO_CLIENT: Client = 0;
/// Above this, backends are read only as fast as the client on stdin reads.
const LOW: usize = 2_000;
const LAST_MESSAGES_MAX: Duration = ms(1_000);
/// Calls of one limited tool that a client may make at once.
const BURST: u32 = 3;
/// The tool with that limit.
const LIMITED: &str = "b0__t1";

pub(crate) struct GatewayProcess {
    pid: Pid,
    gateway: Gateway,
    pub settings: Settings,
    /// By the serial number of the link.
    children: BTreeMap<u64, (Link, Child)>,
    stdio: Option<Stdio>,
    pub front: Option<HttpFront<Response>>,
    stopping: Stopping,
    /// Results of checks, and events that follow from an action.
    later: Vec<Event>,
    next_ticket: u64,
    tickets: Vec<u64>,
    /// Calls of the limited tool that came, by principal.
    limited: BTreeMap<String, u32>,
    /// The principal of each client.
    names: BTreeMap<Client, String>,
}

#[derive(Default)]
struct Stdio {
    is_ended: bool,
    is_broken: bool,
    from_client: Lines,
    to_client: Outbox,
}

#[derive(Clone, Copy, PartialEq)]
enum Stopping {
    No,
    /// Stdin ended; open requests are still answered.
    Draining {
        until: Instant,
    },
    Asked {
        until: Instant,
    },
    Over {
        until: Instant,
    },
}

impl Stopping {
    fn until(self) -> Option<Instant> {
        match self {
            Stopping::No => None,
            Stopping::Draining { until } | Stopping::Asked { until } | Stopping::Over { until } => Some(until),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Move {
    News,
    ReadChild(u64),
    WriteChild(u64),
    ReadClient,
    WriteClient,
    Store,
    Term,
    Time,
    End,
}

impl GatewayProcess {
    pub(crate) fn new(pid: Pid, is_http: bool, seed: u64, shared: &mut Shared) -> GatewayProcess {
        let settings = settings(&mut shared.kernel.dice);
        let gateway = Gateway::new(settings.clone(), seed, BTreeMap::new(), Box::new(AllFit::default()));
        let mut process = GatewayProcess {
            pid,
            gateway,
            settings,
            children: BTreeMap::new(),
            stdio: (!is_http).then(Stdio::default),
            front: is_http.then(|| HttpFront::new(limits(), Some(hash))),
            stopping: Stopping::No,
            later: Vec::new(),
            next_ticket: 1,
            tickets: Vec::new(),
            limited: BTreeMap::new(),
            names: BTreeMap::new(),
        };
        process.tell(Event::TimePassed, shared);
        if is_http {
            let loaded = shared.http.loaded(shared.kernel.wall());
            process.tell_front(loaded, shared);
        } else {
            let who = Who { name: "local".to_owned(), role: None, profile: None };
            process.names.insert(STDIO_CLIENT, who.name.clone());
            process.tell(Event::ClientCame { client: STDIO_CLIENT, front: Front::Lines, who }, shared);
        }
        process
    }

    /// An operator asks for something.
    pub(crate) fn operate(&mut self, shared: &mut Shared) {
        let dice = &mut shared.kernel.dice;
        let name = format!("b{}", dice.below(3));
        let ticket = self.next_ticket;
        match dice.below(4) {
            0 | 1 => {
                self.next_ticket += 1;
                self.tickets.push(ticket);
                let backend = (!dice.one_in(4)).then_some(name);
                self.tell(Event::RestartAsked { ticket, backend, reason: "why not".into() }, shared);
            }
            2 => {
                self.next_ticket += 1;
                self.tickets.push(ticket);
                self.tell(Event::ResumeAsked { ticket, backend: Some(name) }, shared);
            }
            _ => {
                let index = dice.below(self.settings.backends.len() as u64) as usize;
                let name = self.settings.backends[index].name.clone();
                self.settings.backends[index] = backend(&name, false, dice);
                self.tell(Event::Configured(Box::new(self.settings.clone())), shared);
            }
        }
    }

    pub(crate) fn is_asked(&self) -> bool {
        !self.tickets.is_empty()
    }

    /// Nothing is left of requests that ended, and each process is known to the machine.
    pub(crate) fn check_rest(&self, now: Instant) {
        let status = self.gateway.status(now).to_json();
        let under_way = &status["under_way"];
        for table in ["calls", "asked_of_clients", "batches", "waiting_for_offers", "waiting_for_checks"] {
            assert!(under_way[table] == 0, "gateway {}: something is left of {table}: {status}", self.pid);
        }
        let running = self.children.values().filter(|(_, child)| !child.is_gone).count();
        assert!(under_way["links"] == running, "gateway {} has {running} processes: {status}", self.pid);
    }

    pub(crate) fn has_client(&self, client: Client) -> bool {
        self.names.contains_key(&client)
    }

    /// The settings of the backend of a child that was not told to end.
    pub(crate) fn backend_of(&self, pid: Pid) -> Option<&outlast_core::gateway::Backend> {
        let (link, _) = self.children.values().find(|(_, child)| child.pid == pid && !child.is_stopping)?;
        self.gateway.settings_of(*link)
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.due().into_iter().chain(self.stopping.until()).min()
    }

    /// When a machine is due.
    fn due(&self) -> Option<Instant> {
        let lives = self.children.values().filter_map(|(_, child)| child.deadline());
        let front = self.front.as_ref().and_then(HttpFront::deadline);
        lives.chain(self.gateway.deadline()).chain(front).min()
    }

    pub(crate) fn moves(&self, shared: &Shared, moves: &mut Vec<Move>) {
        let kernel = &shared.kernel;
        if kernel.has_news(self.pid) {
            moves.push(Move::News);
        }
        let is_low = self.stdio.as_ref().is_none_or(|stdio| stdio.to_client.bytes() < LOW);
        for (serial, (_, child)) in &self.children {
            if child.can_read(kernel, is_low) {
                moves.push(Move::ReadChild(*serial));
            }
            if child.can_flush(kernel) {
                moves.push(Move::WriteChild(*serial));
            }
        }
        let mut is_quiet = true;
        if let Some(stdio) = &self.stdio {
            let is_heard = is_low || kernel.stdin_hung_up(self.pid);
            if !stdio.is_ended && is_heard && kernel.can_read_stdin(self.pid) {
                moves.push(Move::ReadClient);
            }
            let has_lines = !stdio.to_client.is_empty() && kernel.can_write_stdout(self.pid);
            if !stdio.is_broken && (has_lines || kernel.stdout_hung_up(self.pid)) {
                moves.push(Move::WriteClient);
            }
            is_quiet = stdio.to_client.is_empty();
        }
        if self.front.is_some() && !shared.http.ops.is_empty() && shared.store_ready <= kernel.now {
            moves.push(Move::Store);
        }
        if kernel.get(self.pid).is_some_and(|process| process.is_terminated) {
            moves.push(Move::Term);
        }
        let is_drained =
            matches!(self.stopping, Stopping::Draining { .. }) && self.gateway.in_flight(STDIO_CLIENT) == 0;
        let stops = self.stopping.until().filter(|_| !matches!(self.stopping, Stopping::Over { .. }));
        if is_drained || self.due().into_iter().chain(stops).min().is_some_and(|due| due <= kernel.now) {
            moves.push(Move::Time);
        }
        if let Stopping::Over { until } = self.stopping
            && (until <= kernel.now || is_quiet && self.children.is_empty())
        {
            moves.push(Move::End);
        }
    }

    pub(crate) fn turn(&mut self, which: Move, shared: &mut Shared) {
        let mut heard = Vec::new();
        match which {
            Move::News => {
                let Some((serial, news)) = shared.kernel.next_news(self.pid) else { return };
                if let Some((_, child)) = self.children.get_mut(&serial) {
                    child.news(news, &mut shared.kernel, &mut heard);
                    self.hear(serial, heard, shared);
                }
            }
            Move::ReadChild(serial) => {
                let Some((_, child)) = self.children.get_mut(&serial) else { return };
                child.read(&mut shared.kernel, &mut heard);
                self.hear(serial, heard, shared);
            }
            Move::WriteChild(serial) => {
                let Some((_, child)) = self.children.get_mut(&serial) else { return };
                child.flush(&mut shared.kernel, &mut heard);
                self.hear(serial, heard, shared);
            }
            Move::ReadClient => self.read_client(shared),
            Move::WriteClient => self.write_client(shared),
            Move::Store => {
                let is_ok = !shared.is_unlucky(12);
                let (now, wall) = (shared.kernel.now, shared.kernel.wall());
                let event = shared.http.store(is_ok, now, wall);
                let lag = shared.kernel.dice.pick(&[0, 0, 0, 30, 300, 1_500]);
                shared.store_ready = now + ms(lag);
                event.into_iter().for_each(|event| self.tell_front(event, shared));
            }
            Move::Term => {
                shared.kernel.get_mut(self.pid).expect("it moves").is_terminated = false;
                self.stop(shared);
            }
            Move::Time => self.time_passed(shared),
            Move::End => shared.kernel.exit(self.pid, Exit::Code(0)),
        }
    }

    fn read_client(&mut self, shared: &mut Shared) {
        let read = shared.kernel.read_stdin(self.pid);
        let Some(stdio) = &mut self.stdio else { return };
        match read {
            Read::Nothing => {}
            Read::Bytes(bytes) => {
                stdio.from_client.add(&bytes);
                while let Some(message) = self.stdio.as_mut().and_then(|stdio| stdio.from_client.next_line()) {
                    self.client_said(STDIO_CLIENT, message, None, shared);
                }
            }
            Read::End => {
                stdio.is_ended = true;
                if self.stopping == Stopping::No {
                    let Grace { after_stdin, after_term, .. } = Grace::default();
                    self.stopping = Stopping::Draining { until: shared.kernel.now + after_stdin + after_term };
                }
            }
        }
    }

    fn write_client(&mut self, shared: &mut Shared) {
        let (pid, kernel) = (self.pid, &mut shared.kernel);
        let Some(stdio) = &mut self.stdio else { return };
        if kernel.stdout_hung_up(pid) || !stdio.to_client.flush(|bytes| kernel.write_stdout(pid, bytes)) {
            stdio.is_broken = true;
            stdio.is_ended = true;
            stdio.to_client.clear();
            self.tell(Event::ClientLeft { client: STDIO_CLIENT }, shared);
            if !matches!(self.stopping, Stopping::Asked { .. } | Stopping::Over { .. }) {
                self.stop(shared);
            }
        }
    }

    /// Stops gracefully; a second request stops at once.
    fn stop(&mut self, shared: &mut Shared) {
        self.stdio.iter_mut().for_each(|stdio| stdio.is_ended = true);
        if matches!(self.stopping, Stopping::Asked { .. } | Stopping::Over { .. }) {
            return self.kill_all(shared);
        }
        let Grace { after_stdin, after_term, .. } = Grace::default();
        self.stopping = Stopping::Asked { until: shared.kernel.now + after_stdin + after_term + LAST_MESSAGES_MAX };
        self.tell(Event::StopAsked, shared);
    }

    fn kill_all(&mut self, shared: &mut Shared) {
        for serial in self.children.keys().copied().collect::<Vec<_>>() {
            self.on_child(serial, shared, |child, shared, heard| child.kill(&mut shared.kernel, heard));
        }
    }

    fn on_child(
        &mut self,
        serial: u64,
        shared: &mut Shared,
        act: impl FnOnce(&mut Child, &mut Shared, &mut Vec<Heard>),
    ) {
        let Some((_, child)) = self.children.get_mut(&serial) else { return };
        let mut heard = Vec::new();
        act(child, shared, &mut heard);
        self.hear(serial, heard, shared);
    }

    fn finish(&mut self, shared: &mut Shared) {
        if !matches!(self.stopping, Stopping::Over { .. }) {
            self.stopping = Stopping::Over { until: shared.kernel.now + LAST_MESSAGES_MAX };
            if self.front.is_some() {
                self.tell_front(front::Event::Stopped, shared);
            }
        }
    }

    fn time_passed(&mut self, shared: &mut Shared) {
        let now = shared.kernel.now;
        if let Stopping::Draining { until } = self.stopping
            && (until <= now || self.gateway.in_flight(STDIO_CLIENT) == 0)
        {
            return self.stop(shared);
        }
        if self.gateway.deadline().is_some_and(|due| due <= now) {
            self.tell(Event::TimePassed, shared);
            let due = self.gateway.deadline();
            assert!(due.is_none_or(|due| due > now), "gateway {} has a deadline that stays", self.pid);
        }
        if self.front.as_ref().and_then(HttpFront::deadline).is_some_and(|due| due <= now) {
            self.tell_front(front::Event::TimePassed, shared);
            let due = self.front.as_ref().and_then(HttpFront::deadline);
            assert!(due.is_none_or(|due| due > now), "the front of {} has a deadline that stays", self.pid);
        }
        for serial in self.children.keys().copied().collect::<Vec<_>>() {
            self.on_child(serial, shared, |child, shared, heard| child.time_passed(&mut shared.kernel, heard));
        }
        if let Stopping::Asked { until } = self.stopping
            && until <= now
        {
            self.kill_all(shared);
            self.finish(shared);
        }
    }

    fn hear(&mut self, serial: u64, heard: Vec<Heard>, shared: &mut Shared) {
        for heard in heard {
            let Some((link, child)) = self.children.get_mut(&serial) else { return };
            let link = *link;
            match heard {
                Heard::Started => {
                    let pid = Some(child.pid);
                    self.tell(Event::LinkUp { link, pid }, shared);
                }
                Heard::Said(message) => self.tell(Event::LinkSaid { link, message }, shared),
                Heard::Gone(gone) => {
                    let unsent = child.outbox.unsent().into_iter().map(|(_, line)| line).collect();
                    self.tell(Event::LinkDown { link, how: gone.how, stderr_tail: "ouch".into(), unsent }, shared);
                }
            }
        }
        self.children.retain(|_, (_, child)| !child.is_over());
    }

    fn client_said(&mut self, client: Client, message: Bytes, outline: Option<Outline>, shared: &mut Shared) {
        if let Ok(Message::Request { method, params, .. }) = message::parse(&message)
            && &*method == "tools/call"
            && params.name().and_then(|name| name.text()).as_deref() == Some(LIMITED)
        {
            *self.limited.entry(self.names[&client].clone()).or_default() += 1;
        }
        self.tell(
            match outline {
                Some(outline) => Event::ClientRequested { client, message, outline },
                None => Event::ClientSaid { client, message },
            },
            shared,
        );
    }

    fn tell(&mut self, event: Event, shared: &mut Shared) {
        self.later.push(event);
        if self.later.len() > 1 {
            return;
        }
        while let Some(event) = self.later.first_mut() {
            // The place stays taken until the actions are carried out.
            let event = std::mem::replace(event, Event::TimePassed);
            shared.kernel.tell(&format!("gateway {} >", self.pid), &event);
            for action in self.gateway.handle(event, shared.kernel.now) {
                shared.kernel.tell(&format!("gateway {}   <", self.pid), &action);
                self.act(action, shared);
            }
            self.later.remove(0);
        }
    }

    fn act(&mut self, action: Action, shared: &mut Shared) {
        match action {
            Action::TellClient { client: STDIO_CLIENT, message, .. } => {
                if let Some(stdio) = self.stdio.as_mut().filter(|stdio| !stdio.is_broken) {
                    stdio.to_client.put(message, None);
                }
            }
            Action::TellClient { client, message, about, said } => {
                self.tell_front(front::Event::Told { client, message, about, said }, shared);
            }
            Action::Separate { client, .. } => panic!("client {client} shares no server"),
            Action::DropClient { client } => self.tell_front(front::Event::Dropped { client }, shared),
            Action::Connect { link } => {
                let name = self.gateway.settings_of(link).map(|backend| backend.name.clone()).unwrap_or_default();
                let number = name.trim_start_matches('b').parse().expect("backends are numbered");
                let pid = shared.start(What::Server(number), self.pid, link.serial);
                self.children.insert(link.serial, (link, Child::new(&shared.kernel, pid)));
            }
            Action::TellLink { link, message } => {
                if let Some((_, child)) = self.children.get_mut(&link.serial) {
                    child.outbox.put(message, Some(0));
                }
            }
            Action::Disconnect { link, at_once } => {
                self.on_child(link.serial, shared, |child, shared, heard| match at_once {
                    true => child.kill(&mut shared.kernel, heard),
                    false => child.stop(How::Stopped, &mut shared.kernel, heard),
                });
            }
            Action::Called(called) => {
                // The same outcome has a client with too many calls in flight.
                let has_room = self.gateway.in_flight(called.client) < self.settings.limits.in_flight_max;
                let is_limited = called.outcome == Outcome::RateLimited && has_room;
                let came = self.limited.get(&called.who.name).copied().unwrap_or(0);
                assert!(
                    !is_limited || came > BURST,
                    "{} was refused after {came} calls of {:?}, and {BURST} are allowed",
                    called.who.name,
                    called.tool
                );
            }
            Action::Answer { ticket, .. } => {
                let at = self.tickets.iter().position(|asked| *asked == ticket);
                self.tickets.remove(at.unwrap_or_else(|| panic!("ticket {ticket} was answered twice")));
            }
            Action::Check(job) => self.later.push(Event::Checked { ticket: job.ticket, fit: Fit::Fits }),
            Action::Over => self.finish(shared),
            Action::Record(_)
            | Action::Divert { .. }
            | Action::Note(_)
            | Action::NotificationRefused(_)
            | Action::Keep { .. }
            | Action::DropCheck { .. } => {}
        }
    }

    // ---- clients over HTTP ----------------------------------------------------------------------

    pub(crate) fn tell_front(&mut self, event: front::Event<Response>, shared: &mut Shared) {
        let Some(front) = &mut self.front else { return };
        shared.kernel.tell(&format!("front {} >", self.pid), &event);
        let mut actions = Vec::new();
        front.handle(event, shared.kernel.now, &mut actions);
        let mut for_gateway = Vec::new();
        for action in actions {
            shared.kernel.tell(&format!("front {}   <", self.pid), &action);
            for_gateway.extend(shared.http.act(action, shared.kernel.now));
        }
        // The gateway may answer at once.
        for_gateway.into_iter().for_each(|action| self.act_for_front(action, shared));
    }

    fn act_for_front(&mut self, action: front::Action<Response>, shared: &mut Shared) {
        use front::Action::{Left, RequestCame, Said, SessionCame, SessionRestored};
        match action {
            SessionCame { client, who } => {
                self.names.insert(client, who.name.clone());
                self.tell(Event::ClientCame { client, front: Front::Session, who: (*who).clone() }, shared);
            }
            SessionRestored { client, who, state } => {
                let session = shared.http.session_of(client).expect("it returned").who;
                assert_eq!(*who, *shared.http.people[session], "a session was restored for another client");
                self.names.insert(client, who.name.clone());
                self.tell(Event::ClientRestored { client, who: (*who).clone(), state }, shared);
            }
            RequestCame { client, who } => {
                self.names.insert(client, who.name.clone());
                self.tell(Event::ClientCame { client, front: Front::Request, who: (*who).clone() }, shared);
            }
            Said { client, message, outline } => self.client_said(client, message, outline, shared),
            Left { client, .. } => {
                shared.http.session_of(client).into_iter().for_each(|session| session.is_over = true);
                self.tell(Event::ClientLeft { client }, shared);
            }
            other => panic!("{other:?} is for a client"),
        }
    }
}

fn settings(dice: &mut Dice) -> Settings {
    let rate = Rate { per_minute: 6, burst: BURST };
    Settings {
        backends: (0..1 + dice.below(3)).map(|index| backend(&format!("b{index}"), false, dice)).collect(),
        profiles: BTreeMap::new(),
        default_profile: None,
        roles: BTreeMap::new(),
        rates: Rates { default: None, tools: vec![(Pattern(LIMITED.into()), rate)] },
        switched_off: vec![],
        forward_unknown: false,
        is_host: false,
        limits: Limits {
            hold: Duration::from_secs(1 + dice.below(10)),
            held_max: 1 + dice.below(20) as usize,
            in_flight_max: 5 + dice.below(50) as usize,
            page: 1 + dice.below(5) as usize,
            retry_given_up: Duration::from_secs(30 + dice.below(100)),
        },
    }
}
