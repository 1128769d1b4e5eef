//! Target `relay`: one conversation with a client and servers that send anything, and the promises of the relay.
//!
//! The first line of a script chooses settings by letters, each further line is one event (see [`World::play`]). At
//! the end of the script the client leaves and the conversation must end.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    path::PathBuf,
    time::{Duration, Instant},
};

use bytes::Bytes;
use outlast_core::{
    debounce::{Changed, Print},
    exit::{Exit, How},
    message::Id,
    relay::{
        Action, ClientEnd, Event, Limits, NotWritten, OnCleanExit, Origin, Reading, Relay, Reload, Retry, Settings,
    },
    restarts::Policy,
};

use crate::{
    birth,
    json::{self, Top},
    script,
};

/// The random part of the relay's ids. Clients cannot guess it, so the client of this world does not use it.
const RANDOM: &str = "x7q";
/// How many events of the driver and of time may follow until everything has ended.
const REST_MAX: u32 = 20_000;
/// How many bytes the relay may send per received byte, and per event. A failure with the tail of stderr is the
/// longest answer.
const SAID_PER_BYTE: usize = 64;
const SAID_PER_EVENT: usize = 512 << 10;

pub fn run(input: &[u8]) {
    let mut lines = script::lines(input);
    let mut world = World::new(lines.next().unwrap_or_default());
    for line in lines {
        if world.ended {
            break;
        }
        world.play(line);
        world.report_queues();
    }
    world.rest();
    world.check_end();
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn settings(letters: &[u8]) -> Settings {
    let has = |letter: u8| letters.contains(&letter);
    let mut policy = if has(b'w') { Policy::watchdog() } else { Policy::exponential() };
    policy.first_ready_min = ms(500);
    let mut limits = Limits::default();
    limits.holding.hold_max = ms(3_000);
    limits.holding.held_max = if has(b's') { 3 } else { 256 };
    limits.holding.held_bytes_max = if has(b's') { 700 } else { 1 << 20 };
    limits.holding.opening_wait = ms(1_500);
    limits.handshake.first_handshake_max = ms(4_000);
    limits.handshake.handshake_max = ms(2_000);
    limits.handshake.early_max = 3;
    limits.draining.drain_max = ms(3_000);
    limits.draining.draining_max = if has(b's') { 1 } else { 2 };
    limits.lists.list_max = ms(400);
    limits.lists.list_bytes_max = if has(b's') { 60 } else { 64 << 10 };
    limits.restart.restart_wait = ms(5_000);
    limits.messages.batch_max = 5;
    limits.queue.queued_bytes_max = if has(b'q') { 250 } else { 1 << 20 };
    limits.queue.queued_bytes_stop = 2_000;
    limits.queue.unread_max = ms(300);
    limits.hang.quiet_max = ms(3_000);
    limits.hang.memory_gap = ms(2_000);
    Settings {
        id: "s1".into(),
        name: "fuzz".into(),
        tools: !has(b't'),
        retry: if has(b'a') { Retry::Annotated } else { Retry::Never },
        reload: if has(b'r') { Reload::Replace } else { Reload::BlueGreen },
        build: has(b'b'),
        on_clean_exit: if has(b'o') { OnCleanExit::Restart } else { OnCleanExit::End },
        answer_after: has(b'e').then_some(ms(300)),
        cache: has(b'c'),
        heartbeat: has(b'h').then_some(ms(400)),
        restart_tool: "restart_here".into(),
        call_timeout: has(b'l').then_some(ms(1_500)),
        call_timeouts: [("t1".to_owned(), ms(300)), ("t2".to_owned(), ms(0))].into(),
        memory_max: has(b'm').then_some(1 << 20),
        policy,
        seed: 7,
        random: RANDOM.into(),
        limits,
    }
}

/// The requests and answers of one id of the client.
#[derive(Default)]
struct Owed {
    /// Requests, or lines that may be read as one.
    asked: usize,
    /// How many of them must be answered by the end.
    due: usize,
    answered: usize,
    /// How many pipes took a call of this id.
    taken: usize,
}

#[derive(Default)]
struct Child {
    inbox: VecDeque<(Bytes, Option<u64>)>,
    /// Requests that it has read and not answered, by their id as JSON.
    open: VecDeque<String>,
    /// Requests of its own that may be answered.
    asked: HashMap<Id, usize>,
    stop: Option<How>,
    is_stdin_closed: bool,
    /// The queue length that the relay was last told.
    queued: usize,
}

/// A pending action of the driver.
enum Task {
    Start,
    Build,
    WriteMarker,
    ReadMarker(u64),
    ReadCache(String),
}

struct World {
    born: Instant,
    now: Instant,
    relay: Relay,
    settings: Settings,
    tasks: VecDeque<Task>,
    children: BTreeMap<u32, Child>,
    next_generation: u32,
    owed: HashMap<Id, Owed>,
    /// Open requests of the client by its own numbers, for cancelling.
    client_open: VecDeque<String>,
    next_id: u64,
    cancelled: HashSet<Id>,
    /// Lines that the client sent.
    said: HashSet<Bytes>,
    has_batched: bool,
    /// Requests of servers that the client has received, by their id as JSON.
    questions: VecDeque<String>,
    tickets: HashSet<u64>,
    next_ticket: u64,
    gone: Option<ClientEnd>,
    may_leave: bool,
    ended: bool,
    heard_bytes: usize,
    events: usize,
    said_bytes: usize,
    take_back: Vec<u32>,
}

impl World {
    fn new(letters: &[u8]) -> World {
        let settings = settings(letters);
        let now = birth();
        World {
            born: now,
            now,
            relay: Relay::new(settings.clone()),
            settings,
            tasks: VecDeque::from([Task::Start]),
            children: BTreeMap::new(),
            next_generation: 1,
            owed: HashMap::new(),
            client_open: VecDeque::new(),
            next_id: 1,
            cancelled: HashSet::new(),
            said: HashSet::new(),
            has_batched: false,
            questions: VecDeque::new(),
            tickets: HashSet::new(),
            next_ticket: 1,
            gone: None,
            may_leave: false,
            ended: false,
            heard_bytes: 0,
            events: 0,
            said_bytes: 0,
            take_back: Vec::new(),
        }
    }

    /// One line of the script. A capital letter means the oldest child instead of the newest.
    fn play(&mut self, line: &[u8]) {
        let (kind, rest) = script::split(line);
        let is_oldest = kind.is_ascii_uppercase();
        match kind {
            // The client sends a raw line, or a request or notification: `qtools/list {}`.
            b'c' => self.client_says(rest),
            b'q' => self.client_asks(&rest),
            b'n' => {
                let (method, params) = halves(&rest);
                let line = [b"{\"jsonrpc\":\"2.0\",\"method\":\"", method, b"\",\"params\":", params, b"}"].concat();
                self.client_says(line);
            }
            b'u' if self.gone.is_none() => {
                let start: Bytes = rest.into();
                self.note_client_line(&start, true);
                self.happen(Event::ClientSaidTooMuch(start));
            }
            // The client cancels its newest open request, or answers the oldest server request.
            b'k' => {
                if let Some(id) = self.client_open.pop_back() {
                    let line = format!(
                        r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#
                    );
                    self.client_says(line.into());
                }
            }
            b'y' => {
                if let Some(id) = self.questions.pop_front() {
                    let line = [b"{\"jsonrpc\":\"2.0\",\"id\":", id.as_bytes(), b",\"result\":", &rest, b"}"].concat();
                    self.client_says(line);
                }
            }
            b'g' => self.client_ends(if rest.is_empty() { ClientEnd::Closed } else { ClientEnd::Broken }),
            // A child sends a raw line, answers its oldest open request, answers with an error, or reads.
            b's' | b'S' => {
                if let Some(generation) = self.child(is_oldest) {
                    self.server_says(generation, rest);
                }
            }
            b'a' | b'A' | b'e' | b'E' => {
                let Some(generation) = self.child(is_oldest) else { return };
                self.take(generation);
                let member: &[u8] = if kind.eq_ignore_ascii_case(&b'a') { b"result" } else { b"error" };
                if let Some(id) = self.children.get_mut(&generation).and_then(|child| child.open.pop_front()) {
                    let line = [b"{\"jsonrpc\":\"2.0\",\"id\":", id.as_bytes(), b",\"", member, b"\":", &rest, b"}"];
                    self.server_says(generation, line.concat());
                }
            }
            b'w' | b'W' => {
                if let Some(generation) = self.child(is_oldest) {
                    self.take(generation);
                }
            }
            b'x' | b'X' => {
                if let Some(generation) = self.child(is_oldest) {
                    let how = match rest.first() {
                        Some(b'0') => How::Exited(Exit::Code(0)),
                        Some(b'4') => How::Exited(Exit::Code(42)),
                        Some(b'9') => How::Exited(Exit::Signal(9)),
                        Some(b'c') => How::ClosedStdout,
                        Some(b'l') => How::LineTooLong,
                        _ => How::Exited(Exit::Code(1)),
                    };
                    self.end(generation, how);
                }
            }
            b'l' | b'L' => {
                if let Some(generation) = self.child(is_oldest) {
                    self.heard_bytes += rest.len();
                    let line = String::from_utf8_lossy(&rest).into_owned();
                    self.happen(Event::ServerLogged(generation, line));
                }
            }
            b'm' | b'M' => {
                if let Some(generation) = self.child(is_oldest) {
                    self.happen(Event::ServerMeasured { generation, bytes: script::number(&rest) });
                }
            }
            // The driver completes a pending action, successfully or not; for the cache the rest of the line is the
            // entry.
            b'd' => self.finish_task(true, &rest),
            b'D' => self.finish_task(false, &rest),
            b'r' => self.ask_restart(&rest),
            b'f' => {
                let name = PathBuf::from(String::from_utf8_lossy(&rest).into_owned());
                let changed = Changed { paths: vec![name], more: 0, is_moved: rest.is_empty() };
                let print: Print = script::number(&rest);
                self.happen(Event::FilesChanged { changed, prints: vec![Some(print)] });
            }
            b'h' => self.happen(Event::Forgiven),
            // Time passes, by milliseconds or until the next deadline.
            b't' => {
                self.now += ms(script::number(&rest).min(100_000));
                if self.relay.deadline().is_some_and(|deadline| deadline <= self.now) {
                    self.happen(Event::TimePassed);
                }
            }
            b'T' => self.pass_time(),
            _ => {}
        }
    }

    fn child(&self, is_oldest: bool) -> Option<u32> {
        let mut alive = self.children.keys();
        if is_oldest { alive.next() } else { alive.next_back() }.copied()
    }

    // ---- the client -----------------------------------------------------------------------------

    fn client_asks(&mut self, rest: &[u8]) {
        let (method, params) = halves(rest);
        let id = self.next_id.to_string();
        self.next_id += 1;
        self.client_open.push_back(id.clone());
        let start: &[u8] = b"{\"jsonrpc\":\"2.0\",\"id\":";
        let line = [start, id.as_bytes(), b",\"method\":\"", method, b"\",\"params\":", params, b"}"].concat();
        self.client_says(line);
    }

    fn client_says(&mut self, mut line: Vec<u8>) {
        if self.gone.is_some() {
            return;
        }
        line.retain(|byte| *byte != b'\n');
        line.push(b'\n');
        let line: Bytes = line.into();
        if !self.note_client_line(&line, false) {
            return;
        }
        self.said.insert(line.clone());
        self.happen(Event::ClientSaid(line));
    }

    /// Records which answers are due for this line. False if the line uses an id that no client can know.
    fn note_client_line(&mut self, line: &Bytes, is_cut: bool) -> bool {
        self.heard_bytes += line.len();
        if is_cut {
            // If the start of the line contains an id, the answer has that id.
            let ids = outlast_core::message::id_at_start(line);
            ids.into_iter().for_each(|id| self.owed.entry(id).or_default().asked += 1);
            return true;
        }
        let texts = match json::read(line) {
            Some(Top::Object(_)) => vec![std::str::from_utf8(line).unwrap_or_default()],
            Some(Top::Array(elements)) => {
                self.has_batched = true;
                elements
            }
            _ => return true,
        };
        for text in texts {
            let Some(Top::Object(members)) = json::read(text.as_bytes()) else { continue };
            let message = Envelope::of(&members);
            if message.is_answer() {
                continue;
            }
            let ids: Vec<Id> = message.ids.iter().filter_map(|id| Id::parse(id)).collect();
            if ids.iter().any(|id| matches!(id, Id::Text(text) if text.starts_with("outlast-"))) {
                return false;
            }
            let is_plain = !self.has_batched && ids.len() == 1 && message.ids.len() == 1 && message.methods.len() == 1;
            let is_listen = message.method().is_none_or(|method| method == "subscriptions/listen");
            for id in ids {
                let owed = self.owed.entry(id).or_default();
                owed.asked += 1;
                owed.due += usize::from(is_plain && !is_listen);
            }
            if message.method().as_deref() == Some("notifications/cancelled") && message.ids.is_empty() {
                let requests = message.params.iter().filter_map(|params| member(params, "requestId"));
                self.cancelled.extend(requests.filter_map(Id::parse));
            }
        }
        true
    }

    fn client_ends(&mut self, end: ClientEnd) {
        if self.gone.is_none() {
            self.gone = Some(end);
            self.happen(Event::ClientEnded(end));
        }
    }

    fn client_hears(&mut self, line: &Bytes, event_line: Option<&Bytes>) {
        self.said_bytes += line.len();
        let top = checked(line, "the client");
        assert!(self.gone != Some(ClientEnd::Broken), "said to a client that does not read: {line:?}");
        let texts = match top {
            Top::Object(_) => vec![std::str::from_utf8(line).unwrap_or_default()],
            // Arrays of servers are forwarded unchanged if the revision has no batches.
            Top::Array(_) if event_line == Some(line) => return,
            Top::Array(elements) => elements,
            Top::Scalar => panic!("the client was told {line:?}"),
        };
        for text in texts {
            let Some(Top::Object(members)) = json::read(text.as_bytes()) else { panic!("the client was told {text}") };
            let message = Envelope::of(&members);
            if !message.is_answer() {
                if let (Some(id), Some(_)) = (message.ids.last(), message.method()) {
                    self.questions.push_back((*id).to_owned());
                }
                continue;
            }
            let Some(id) = message.ids.last().and_then(|id| Id::parse(id)) else { continue };
            let Some(owed) = self.owed.get_mut(&id) else { panic!("an answer to {id}, which was never asked: {text}") };
            owed.answered += 1;
            assert!(owed.answered <= owed.asked, "{id} was asked {} times, answered again by {text}", owed.asked);
        }
    }

    // ---- the servers ----------------------------------------------------------------------------

    fn server_says(&mut self, generation: u32, mut line: Vec<u8>) {
        line.retain(|byte| *byte != b'\n');
        line.push(b'\n');
        let line: Bytes = line.into();
        self.heard_bytes += line.len();
        let child = self.children.get_mut(&generation).expect("it is alive");
        let texts = match json::read(line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&line)) {
            Some(Top::Array(elements)) => elements,
            _ => {
                vec![std::str::from_utf8(line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&line)).unwrap_or_default()]
            }
        };
        for text in texts {
            let Some(Top::Object(members)) = json::read(text.as_bytes()) else { continue };
            let message = Envelope::of(&members);
            if !message.is_answer() {
                message
                    .ids
                    .iter()
                    .filter_map(|id| Id::parse(id))
                    .for_each(|id| *child.asked.entry(id).or_default() += 1);
            }
        }
        self.happen(Event::ServerSaid(generation, line));
    }

    fn server_is_told(&mut self, generation: u32, line: Bytes, mark: Option<u64>) {
        self.said_bytes += line.len();
        let top = checked(&line, "a server");
        let child = self.children.get_mut(&generation).expect("only a child that runs is told something");
        if let Top::Object(members) = top {
            let message = Envelope::of(&members);
            if message.is_answer()
                && let Some(id) = message.ids.last().and_then(|id| Id::parse(id))
            {
                let asked = child.asked.get_mut(&id);
                let asked = asked.unwrap_or_else(|| panic!("generation {generation} never asked {id}: {line:?}"));
                assert!(*asked > 0, "{id} of generation {generation} was answered twice: {line:?}");
                *asked -= 1;
            }
            if message.method().as_deref() == Some("tools/call") && !self.has_batched {
                assert!(self.said.contains(&line), "a call was rewritten: {line:?}");
            }
        }
        child.inbox.push_back((line, mark));
    }

    /// The pipe takes all lines that wait for it.
    fn take(&mut self, generation: u32) {
        let child = self.children.get_mut(&generation).expect("it is alive");
        for (line, _) in child.inbox.drain(..) {
            let Some(Top::Object(members)) = json::read(&line) else { continue };
            let message = Envelope::of(&members);
            let (Some(method), Some(id)) = (message.method(), message.ids.last()) else { continue };
            child.open.push_back((*id).to_owned());
            if method == "tools/call"
                && self.settings.retry == Retry::Never
                && let Some(owed) = Id::parse(id).and_then(|id| self.owed.get_mut(&id))
            {
                owed.taken += 1;
                assert!(owed.taken <= owed.asked, "call {id} was sent to {} servers", owed.taken);
            }
        }
    }

    fn end(&mut self, generation: u32, own: How) {
        let child = self.children.remove(&generation).expect("it is alive");
        let unsent = child.inbox.into_iter().filter_map(|(line, mark)| Some((mark?, line))).collect();
        let how = child.stop.unwrap_or(own);
        self.may_leave |= matches!(how, How::Exited(Exit::Code(0)));
        self.happen(Event::ServerWentDown { generation, how, unsent });
    }

    /// The driver reports how many bytes wait for each pipe, from a bound on.
    fn report_queues(&mut self) {
        let max = self.settings.limits.queue.queued_bytes_max;
        let mut news = Vec::new();
        for (generation, child) in &mut self.children {
            let bytes = child.inbox.iter().map(|(line, _)| line.len()).sum();
            if bytes != child.queued && (bytes >= max || child.queued >= max) {
                child.queued = bytes;
                news.push((*generation, bytes));
            }
        }
        for (generation, bytes) in news {
            if !self.ended && self.children.contains_key(&generation) {
                self.happen(Event::ServerQueue { generation, bytes });
            }
        }
    }

    // ---- the driver -----------------------------------------------------------------------------

    fn finish_task(&mut self, goes_well: bool, rest: &[u8]) {
        match self.tasks.pop_front() {
            None => {}
            Some(Task::Start) if goes_well => {
                let generation = self.next_generation;
                self.next_generation += 1;
                self.children.insert(generation, Child::default());
                self.happen(Event::ServerStarted { generation, pid: 1_000 + generation, unix: 1e9 });
            }
            Some(Task::Start) => self.happen(Event::StartFailed("permission denied".into())),
            Some(Task::Build) => {
                let is_built = goes_well && self.gone.is_none() && !self.may_leave;
                self.happen(Event::BuildEnded(if is_built { Ok(()) } else { Err("error: no\nmore".into()) }));
            }
            Some(Task::WriteMarker) => {
                let unwritten = NotWritten { why: "read-only".into(), timestamp: 6.0, iso_time: "then".into() };
                self.happen(Event::MarkerWritten(if goes_well { Ok("marker".into()) } else { Err(unwritten) }));
            }
            Some(Task::ReadMarker(key)) => {
                let path = "marker".to_owned();
                let reading = match (goes_well, rest.is_empty()) {
                    (true, _) => {
                        Reading::Valid { timestamp: 5.0, pid: 3, reason: "why".into(), iso_time: "then".into() }
                    }
                    (false, true) => Reading::Missing { path },
                    (false, false) => Reading::Corrupt { path, error: String::from_utf8_lossy(rest).into_owned() },
                };
                self.happen(Event::MarkerRead { key, reading, unix: 1e9 });
            }
            Some(Task::ReadCache(revision)) => {
                self.heard_bytes += rest.len();
                let entry = goes_well.then(|| String::from_utf8_lossy(rest).into_owned());
                self.happen(Event::CacheRead { revision, entry });
            }
        }
    }

    fn ask_restart(&mut self, rest: &[u8]) {
        let origin = match rest.first() {
            Some(b'w') => Origin::Watch,
            _ => Origin::Control,
        };
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.tickets.insert(ticket);
        self.heard_bytes += rest.len();
        let reason = String::from_utf8_lossy(rest).into_owned();
        self.happen(Event::RestartAsked { ticket, origin, reason, at_once: rest.last() == Some(&b'!') });
    }

    fn pass_time(&mut self) {
        if let Some(deadline) = self.relay.deadline() {
            self.now = self.now.max(deadline);
            self.happen(Event::TimePassed);
        }
    }

    /// The client leaves, and everything that has begun ends.
    fn rest(&mut self) {
        if !self.ended {
            self.client_ends(ClientEnd::Closed);
        }
        for _ in 0..REST_MAX {
            if self.ended {
                return;
            }
            self.report_queues();
            let must_end = |child: &Child| child.stop.is_some() || child.is_stdin_closed;
            let ending = self.children.iter().find(|(_, child)| must_end(child)).map(|(generation, _)| *generation);
            if !self.tasks.is_empty() {
                self.finish_task(true, b"");
            } else if let Some(generation) = ending {
                self.end(generation, How::Exited(Exit::Code(1)));
            } else if self.relay.deadline().is_some() {
                self.pass_time();
            } else {
                panic!("the client has left, nothing is due, and the relay is not over");
            }
        }
        panic!("the relay never comes to its end");
    }

    fn check_end(&self) {
        assert!(self.children.is_empty(), "over with children left");
        assert!(self.tickets.is_empty(), "restarts {:?} were never answered", self.tickets);
        assert!(self.relay.is_over());
        for (id, owed) in &self.owed {
            let is_owed = self.gone != Some(ClientEnd::Broken) && !self.cancelled.contains(id);
            assert!(!is_owed || owed.answered >= owed.due, "{id}: {} of {} answered", owed.answered, owed.due);
        }
    }

    // ---- one event ------------------------------------------------------------------------------

    fn happen(&mut self, event: Event) {
        if self.ended {
            return;
        }
        self.events += 1;
        let event_line = match &event {
            Event::ServerSaid(_, line) => Some(line.clone()),
            _ => None,
        };
        let is_time = matches!(event, Event::TimePassed);
        let mut actions = Vec::new();
        self.relay.handle(event, self.now, &mut actions);
        for action in actions {
            self.act(action, event_line.as_ref());
        }
        if is_time && !self.ended {
            let deadline = self.relay.deadline();
            assert!(deadline.is_none_or(|deadline| deadline > self.now), "what was due was not done");
        }
        let allowed = SAID_PER_EVENT * self.events + SAID_PER_BYTE * self.heard_bytes;
        assert!(self.said_bytes <= allowed, "{} bytes said for {} heard", self.said_bytes, self.heard_bytes);
        while let Some(generation) = self.take_back.pop() {
            let Some(child) = self.children.get_mut(&generation) else { continue };
            let (marked, rest) = child.inbox.drain(..).partition(|(_, mark)| mark.is_some());
            child.inbox = rest;
            let marked: VecDeque<(Bytes, Option<u64>)> = marked;
            let unsent = marked.into_iter().filter_map(|(line, mark)| Some((mark?, line))).collect();
            self.happen(Event::TakenBack { generation, unsent });
        }
        if !is_time {
            self.pass_no_time();
        }
    }

    /// An extra call changes nothing.
    fn pass_no_time(&mut self) {
        let deadline = self.relay.deadline();
        if !self.ended && deadline.is_none_or(|deadline| self.now < deadline) {
            let mut actions = Vec::new();
            self.relay.handle(Event::TimePassed, self.now, &mut actions);
            assert!(actions.is_empty(), "acted before its time: {actions:?}");
            assert!(self.relay.deadline() == deadline, "another deadline after a call too many");
        }
    }

    fn act(&mut self, action: Action, event_line: Option<&Bytes>) {
        assert!(!self.ended || matches!(action, Action::Record(_)), "acted after the end: {action:?}");
        let is_gone = self.gone.is_some();
        match action {
            Action::TellClient(line) => self.client_hears(&line, event_line),
            Action::TellServer { generation, line, mark } => self.server_is_told(generation, line, mark),
            Action::TakeBack(generation) => self.take_back.push(generation),
            Action::CloseStdin(generation) => {
                let child = self.children.get_mut(&generation).expect("only a child that runs is told something");
                assert!(!std::mem::replace(&mut child.is_stdin_closed, true), "closed twice");
            }
            Action::ReadCache(revision) => self.tasks.push_back(Task::ReadCache(revision)),
            Action::SaveCache { entry, .. } => {
                let is_json = entry.is_none_or(|entry| json::read(entry.as_bytes()).is_some());
                assert!(is_json, "saved what is no JSON");
            }
            Action::Build => {
                assert!(!is_gone, "a build after the client's end");
                self.tasks.push_back(Task::Build);
            }
            Action::StopBuild => assert!(self.tasks.iter().any(|task| matches!(task, Task::Build)), "stopped no build"),
            Action::Start => {
                assert!(!is_gone, "a start after the client's end");
                assert!(!self.tasks.iter().any(|task| matches!(task, Task::Start)), "two starts at once");
                self.tasks.push_back(Task::Start);
            }
            Action::Stop { generation, how } => {
                let child = self.children.get_mut(&generation).expect("only a child that runs is stopped");
                assert!(child.stop.replace(how).is_none(), "generation {generation} stopped twice");
            }
            Action::MarkReady(generation) => {
                assert!(self.children.contains_key(&generation), "generation {generation} is ready and gone");
            }
            Action::WriteMarker { .. } => self.tasks.push_back(Task::WriteMarker),
            Action::ReadMarker(key) => self.tasks.push_back(Task::ReadMarker(key)),
            Action::Record(_) | Action::Divert { .. } => {}
            Action::Answer { ticket: 0, .. } => {}
            Action::Answer { ticket, .. } => assert!(self.tickets.remove(&ticket), "restart {ticket} answered twice"),
            Action::End(_) => {
                assert!(is_gone || self.may_leave, "ended by itself after {:?}", self.now - self.born);
                self.ended = true;
            }
        }
    }
}

/// `method params`: the part before the first space, and the part after it or `{}`.
pub fn halves(rest: &[u8]) -> (&[u8], &[u8]) {
    match rest.iter().position(|byte| *byte == b' ') {
        Some(at) => (&rest[..at], &rest[at + 1..]),
        None => (rest, b"{}"),
    }
}

/// Checks that a sent line is one line of JSON.
pub fn checked<'a>(line: &'a [u8], whom: &str) -> Top<'a> {
    let inside = line.strip_suffix(b"\n").unwrap_or_else(|| panic!("{whom} was told less than a line: {line:?}"));
    assert!(!inside.contains(&b'\n'), "{whom} was told more than one line");
    json::read(inside).unwrap_or_else(|| panic!("{whom} was told what is not JSON: {}", String::from_utf8_lossy(line)))
}

/// The members of a message that JSON-RPC knows, with duplicates.
pub struct Envelope<'a> {
    pub ids: Vec<&'a str>,
    pub methods: Vec<&'a str>,
    pub params: Vec<&'a str>,
    pub outcomes: usize,
}

impl<'a> Envelope<'a> {
    pub fn of(members: &[(String, &'a str)]) -> Envelope<'a> {
        let all = |name: &str| members.iter().filter(|(known, _)| known == name).map(|(_, value)| *value).collect();
        let outcomes = members.iter().filter(|(name, _)| name == "result" || name == "error").count();
        Envelope { ids: all("id"), methods: all("method"), params: all("params"), outcomes }
    }

    pub fn method(&self) -> Option<String> {
        self.methods.last().filter(|method| method.starts_with('"')).map(|method| json::decoded(method))
    }

    pub fn is_answer(&self) -> bool {
        self.method().is_none() && self.outcomes > 0
    }
}

/// The last member of that name in an object.
pub fn member<'a>(object: &'a str, name: &str) -> Option<&'a str> {
    match json::read(object.as_bytes())? {
        Top::Object(members) => members.into_iter().rfind(|(known, _)| known == name).map(|(_, value)| value),
        _ => None,
    }
}
