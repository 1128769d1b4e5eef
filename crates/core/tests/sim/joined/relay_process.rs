//! `outlast mcp` as a process: the relay machine, with the pipes of its client and its servers.

use std::{collections::BTreeMap, time::Instant};

use outlast_core::{
    exit::Exit,
    relay::{
        Action, ClientEnd, Event, Limits, NotWritten, OnCleanExit, Origin, Reading, Relay, Reload, Retry, Settings,
    },
    restarts::Policy,
};

use super::{Shared, What};
use crate::{
    Dice,
    kernel::{Child, Heard, Lines, Outbox, Pid, Read},
    ms,
};

/// Above this the sources that fill the client's queue are not read.
const LOW: usize = 2_000;
/// How long the last messages may take when it ends.
const LAST_MESSAGES_MAX: std::time::Duration = ms(1_000);

pub(crate) struct RelayProcess {
    pid: Pid,
    /// What it starts as its server.
    what: What,
    relay: Relay,
    children: BTreeMap<u32, Child>,
    next_generation: u32,
    awaits_first: bool,
    /// The lengths of queues that the machine was last told.
    queues: BTreeMap<u32, Option<usize>>,
    stdin_ended: bool,
    from_client: Lines,
    to_client: Outbox,
    is_broken: bool,
    /// Files, builds and caches take a while.
    files: Vec<(Instant, Event)>,
    next_ticket: u64,
    tickets: Vec<u64>,
    is_stopped: bool,
    ending: Option<(u8, Instant)>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Move {
    News,
    ReadChild(u32),
    WriteChild(u32),
    ReadClient,
    WriteClient,
    Files,
    Term,
    Time,
    End,
}

impl RelayProcess {
    /// The first server is started at once.
    pub(crate) fn new(pid: Pid, what: What, seed: u64, shared: &mut Shared) -> RelayProcess {
        let relay = Relay::new(settings(seed, &mut shared.kernel.dice));
        let mut process = RelayProcess {
            pid,
            what,
            relay,
            children: BTreeMap::new(),
            next_generation: 1,
            awaits_first: true,
            queues: BTreeMap::new(),
            stdin_ended: false,
            from_client: Lines::default(),
            to_client: Outbox::default(),
            is_broken: false,
            files: Vec::new(),
            next_ticket: 1,
            tickets: Vec::new(),
            is_stopped: false,
            ending: None,
        };
        process.start(shared);
        process
    }

    /// An operator asks for a restart.
    pub(crate) fn restart(&mut self, at_once: bool, shared: &mut Shared) {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.tickets.push(ticket);
        let (origin, reason) = (Origin::Control, "why not".into());
        self.tell(Event::RestartAsked { ticket, origin, reason, at_once }, shared);
    }

    /// An operator waits for an answer.
    pub(crate) fn is_asked(&self) -> bool {
        !self.tickets.is_empty()
    }

    /// At rest there is the server that serves, and no other.
    pub(crate) fn check_rest(&self) {
        let running = self.children.values().filter(|child| !child.is_gone).count();
        assert!(running <= 1, "relay {} has {running} servers at rest", self.pid);
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        let files = self.files.iter().map(|(at, _)| *at);
        let lives = self.children.values().filter_map(Child::deadline);
        let ending = self.ending.map(|(_, until)| until);
        files.chain(lives).chain(self.relay.deadline()).chain(ending).min()
    }

    fn is_low(&self) -> bool {
        self.to_client.bytes() < LOW
    }

    pub(crate) fn moves(&self, shared: &Shared, moves: &mut Vec<Move>) {
        let kernel = &shared.kernel;
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= kernel.now);
        if kernel.has_news(self.pid) {
            moves.push(Move::News);
        }
        for (generation, child) in &self.children {
            if child.can_read(kernel, self.is_low()) {
                moves.push(Move::ReadChild(*generation));
            }
            if child.can_flush(kernel) {
                moves.push(Move::WriteChild(*generation));
            }
        }
        let is_heard = self.is_low() && self.relay.reads_client() || kernel.stdin_hung_up(self.pid);
        if !self.stdin_ended && !self.awaits_first && is_heard && kernel.can_read_stdin(self.pid) {
            moves.push(Move::ReadClient);
        }
        let has_lines = !self.to_client.is_empty() && kernel.can_write_stdout(self.pid);
        if !self.is_broken && (has_lines || kernel.stdout_hung_up(self.pid)) {
            moves.push(Move::WriteClient);
        }
        if self.files.iter().any(|(at, _)| *at <= kernel.now) {
            moves.push(Move::Files);
        }
        if kernel.get(self.pid).is_some_and(|process| process.is_terminated) {
            moves.push(Move::Term);
        }
        let lives = self.children.values().filter_map(Child::deadline).min();
        if is_due(self.relay.deadline()) || is_due(lives) {
            moves.push(Move::Time);
        }
        if let Some((_, until)) = self.ending
            && (until <= kernel.now || self.to_client.is_empty() && self.children.is_empty())
        {
            moves.push(Move::End);
        }
    }

    pub(crate) fn turn(&mut self, which: Move, shared: &mut Shared) {
        let mut heard = Vec::new();
        match which {
            Move::News => {
                let Some((key, news)) = shared.kernel.next_news(self.pid) else { return };
                self.awaits_first = false;
                if let Some(child) = self.children.get_mut(&(key as u32)) {
                    child.news(news, &mut shared.kernel, &mut heard);
                    self.hear(key as u32, heard, shared);
                }
            }
            Move::ReadChild(generation) => {
                let Some(child) = self.children.get_mut(&generation) else { return };
                child.read(&mut shared.kernel, &mut heard);
                self.hear(generation, heard, shared);
            }
            Move::WriteChild(generation) => {
                let Some(child) = self.children.get_mut(&generation) else { return };
                child.flush(&mut shared.kernel, &mut heard);
                self.hear(generation, heard, shared);
                self.tell_queue(generation, shared);
            }
            Move::ReadClient => self.read_client(shared),
            Move::WriteClient => {
                let (pid, kernel) = (self.pid, &mut shared.kernel);
                if kernel.stdout_hung_up(pid) || !self.to_client.flush(|bytes| kernel.write_stdout(pid, bytes)) {
                    self.is_broken = true;
                    self.to_client.clear();
                    self.tell(Event::ClientEnded(ClientEnd::Broken), shared);
                }
            }
            Move::Files => {
                let Some(index) = self.files.iter().position(|(at, _)| *at <= shared.kernel.now) else { return };
                let (_, event) = self.files.remove(index);
                self.tell(event, shared);
            }
            Move::Term => self.terminated(shared),
            Move::Time => self.time_passed(shared),
            Move::End => {
                let code = self.ending.map_or(0, |(code, _)| code);
                shared.kernel.exit(self.pid, Exit::Code(code.into()));
            }
        }
    }

    fn read_client(&mut self, shared: &mut Shared) {
        match shared.kernel.read_stdin(self.pid) {
            Read::Nothing => {}
            Read::Bytes(bytes) => {
                self.from_client.add(&bytes);
                while let Some(line) = self.from_client.next_line() {
                    self.tell(Event::ClientSaid(line), shared);
                }
            }
            Read::End => {
                self.stdin_ended = true;
                if let Some(line) = self.from_client.rest() {
                    self.tell(Event::ClientSaid(line), shared);
                }
                self.tell(Event::ClientEnded(ClientEnd::Closed), shared);
            }
        }
    }

    /// The first signal stops with a grace period, the second at once.
    fn terminated(&mut self, shared: &mut Shared) {
        shared.kernel.get_mut(self.pid).expect("it moves").is_terminated = false;
        self.stdin_ended = true;
        if !std::mem::replace(&mut self.is_stopped, true) {
            return self.tell(Event::ClientEnded(ClientEnd::Closed), shared);
        }
        for generation in self.children.keys().copied().collect::<Vec<_>>() {
            let mut heard = Vec::new();
            self.children.get_mut(&generation).into_iter().for_each(|child| child.kill(&mut shared.kernel, &mut heard));
            self.hear(generation, heard, shared);
        }
    }

    fn time_passed(&mut self, shared: &mut Shared) {
        if self.relay.deadline().is_some_and(|due| due <= shared.kernel.now) {
            self.tell(Event::TimePassed, shared);
            let due = self.relay.deadline();
            assert!(due.is_none_or(|due| due > shared.kernel.now), "relay {} has a deadline that stays", self.pid);
        }
        for generation in self.children.keys().copied().collect::<Vec<_>>() {
            let mut heard = Vec::new();
            let child = self.children.get_mut(&generation);
            child.into_iter().for_each(|child| child.time_passed(&mut shared.kernel, &mut heard));
            self.hear(generation, heard, shared);
        }
    }

    fn hear(&mut self, generation: u32, heard: Vec<Heard>, shared: &mut Shared) {
        for heard in heard {
            let Some(child) = self.children.get_mut(&generation) else { return };
            match heard {
                Heard::Started => {
                    self.next_generation = generation + 1;
                    let (pid, unix) = (child.pid, shared.kernel.unix());
                    self.tell(Event::ServerStarted { generation, pid, unix }, shared);
                }
                Heard::Said(line) => self.tell(Event::ServerSaid(generation, line), shared),
                Heard::Gone(gone) if gone.pid.is_none() => {
                    self.children.remove(&generation);
                    return self.tell(Event::StartFailed("no such program".into()), shared);
                }
                Heard::Gone(gone) => {
                    let unsent = child.outbox.unsent();
                    self.tell(Event::ServerWentDown { generation, how: gone.how, unsent }, shared);
                }
            }
        }
        self.children.retain(|_, child| !child.is_over());
    }

    fn tell_queue(&mut self, generation: u32, shared: &mut Shared) {
        let Some(child) = self.children.get(&generation) else { return };
        let bytes = child.outbox.bytes();
        let queued = Some(bytes).filter(|bytes| *bytes >= self.relay.queued_bytes_max());
        if self.queues.insert(generation, queued).flatten() != queued {
            self.tell(Event::ServerQueue { generation, bytes }, shared);
        }
    }

    fn tell(&mut self, event: Event, shared: &mut Shared) {
        shared.kernel.tell(&format!("relay {} >", self.pid), &event);
        let mut actions = Vec::new();
        self.relay.handle(event, shared.kernel.now, &mut actions);
        let mut take_back = Vec::new();
        let mut told = Vec::new();
        for action in actions {
            shared.kernel.tell(&format!("relay {}   <", self.pid), &action);
            match action {
                Action::TakeBack(generation) => take_back.push(generation),
                Action::TellServer { generation, .. } => {
                    told.push(generation);
                    self.act(action, shared);
                }
                action => self.act(action, shared),
            }
        }
        for generation in take_back {
            let child = self.children.get_mut(&generation);
            let unsent = child.map(|child| child.outbox.take_back()).unwrap_or_default();
            self.tell(Event::TakenBack { generation, unsent }, shared);
        }
        told.into_iter().for_each(|generation| self.tell_queue(generation, shared));
    }

    fn act(&mut self, action: Action, shared: &mut Shared) {
        match action {
            Action::TellClient(line) => {
                if !self.is_broken {
                    self.to_client.put(line, None);
                }
            }
            Action::TellServer { generation, line, mark } => {
                if let Some(child) = self.children.get_mut(&generation) {
                    child.outbox.put(line, mark);
                }
            }
            Action::CloseStdin(generation) => {
                let child = self.children.get_mut(&generation);
                child.into_iter().for_each(|child| child.close_stdin(&mut shared.kernel));
            }
            Action::Start => self.start(shared),
            Action::Stop { generation, how } => {
                let mut heard = Vec::new();
                if let Some(child) = self.children.get_mut(&generation) {
                    child.stop(how, &mut shared.kernel, &mut heard);
                }
                self.hear(generation, heard, shared);
            }
            Action::Build => {
                let result = if shared.is_unlucky(3) { Err("error: no".to_owned()) } else { Ok(()) };
                self.later(400, Event::BuildEnded(result), shared);
            }
            Action::StopBuild => {
                self.files.retain(|(_, event)| !matches!(event, Event::BuildEnded(_)));
                self.later(20, Event::BuildEnded(Err("stopped".to_owned())), shared);
            }
            Action::ReadCache(revision) => {
                let entry = shared.cache.get(&revision).filter(|_| !self.is_stopped).cloned();
                self.later(300, Event::CacheRead { revision, entry }, shared);
            }
            Action::SaveCache { revision, entry } => match entry {
                Some(entry) => drop(shared.cache.insert(revision, entry)),
                None => drop(shared.cache.remove(&revision)),
            },
            Action::WriteMarker { .. } => {
                let timestamp = shared.kernel.unix();
                let unwritten = NotWritten { why: "read-only".into(), timestamp, iso_time: "then".into() };
                let result = if shared.is_unlucky(6) { Err(unwritten) } else { Ok("marker".to_owned()) };
                self.later(50, Event::MarkerWritten(result), shared);
            }
            Action::ReadMarker(key) => {
                let (unix, reading) = (shared.kernel.unix(), Reading::Missing { path: "marker".into() });
                self.later(50, Event::MarkerRead { key, reading, unix }, shared);
            }
            // The relay's own restarts.
            Action::Answer { ticket: 0, .. } => {}
            Action::Answer { ticket, .. } => {
                let at = self.tickets.iter().position(|asked| *asked == ticket);
                self.tickets.remove(at.unwrap_or_else(|| panic!("ticket {ticket} was answered twice")));
            }
            Action::End(code) => self.ending = Some((code, shared.kernel.now + LAST_MESSAGES_MAX)),
            Action::TakeBack(_) | Action::MarkReady(_) | Action::Record(_) | Action::Divert { .. } => {}
        }
    }

    fn later(&mut self, most: u64, event: Event, shared: &mut Shared) {
        let lag = shared.kernel.dice.below(most);
        self.files.push((shared.kernel.now + ms(lag), event));
    }

    fn start(&mut self, shared: &mut Shared) {
        let generation = self.next_generation;
        let pid = shared.start(self.what, self.pid, generation.into());
        self.queues.remove(&generation);
        self.children.insert(generation, Child::new(&shared.kernel, pid));
    }
}

fn settings(seed: u64, dice: &mut Dice) -> Settings {
    let mut policy = dice.pick(&[Policy::watchdog(), Policy::watchdog(), Policy::exponential()]);
    policy.first_ready_min = ms(500);
    policy.healthy = ms(8_000);
    let mut settings = Settings {
        id: "s1".into(),
        name: "sim".into(),
        tools: !dice.one_in(4),
        retry: if dice.one_in(2) { Retry::Never } else { Retry::Annotated },
        reload: if dice.one_in(3) { Reload::Replace } else { Reload::BlueGreen },
        build: dice.one_in(4),
        on_clean_exit: if dice.one_in(2) { OnCleanExit::End } else { OnCleanExit::Restart },
        answer_after: None,
        cache: dice.one_in(2),
        heartbeat: dice.one_in(4).then_some(ms(400)),
        restart_tool: "restart_here".into(),
        call_timeout: dice.one_in(4).then_some(ms(10_000)),
        call_timeouts: BTreeMap::new(),
        memory_max: None,
        policy,
        seed,
        random: "x7q".into(),
        limits: Limits::default(),
    };
    let limits = &mut settings.limits;
    limits.holding.hold_max = ms(4_000);
    limits.holding.held_max = dice.pick(&[3, 256]);
    limits.holding.opening_wait = ms(2_500);
    limits.handshake.first_handshake_max = ms(8_000);
    limits.handshake.handshake_max = ms(4_000);
    limits.draining.drain_max = ms(3_000);
    limits.draining.draining_max = dice.pick(&[1, 2]);
    limits.restart.restart_wait = ms(5_000);
    limits.queue.queued_bytes_max = dice.pick(&[600, 8 << 20]);
    limits.queue.queued_bytes_stop = 2_000;
    limits.queue.unread_max = ms(300);
    settings
}
