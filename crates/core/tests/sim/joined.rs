//! All machines in one world, on one simulated kernel: a session runs an agent, the agent is the client of a relay, the
//! relay keeps a gateway or a server alive, and a gateway keeps backends alive; HTTP clients use a second gateway beside
//! them. Processes crash, hang, linger and are killed, pipes block and split, clocks jump, and the store fails.
//!
//! Every request has a number, so that a ledger shows what was executed twice, answered twice or answered to another
//! client. After the faults everything comes to rest, and then everything is stopped.

mod agent;
mod conversation;
mod gateway_process;
mod ledger;
mod relay_process;
mod server;
mod session_process;

use std::{collections::BTreeMap, time::Instant};

use bytes::Bytes;
use outlast_core::{
    exit::Exit,
    front::{self, record::Change},
    gateway::Children,
    message::{self, Message},
};
use serde_json::Value;

use crate::{
    Dice,
    http::{Clients, Found, Head, Response},
    kernel::{Kernel, Order, Pid, Reactions},
    mcp_server::McpServer,
    ms, seeds,
    story::{Played, Story, play},
};
use agent::Agent;
use conversation::Conversation;
use gateway_process::GatewayProcess;
use ledger::Ledger;
use relay_process::RelayProcess;
use server::Server;
use session_process::SessionProcess;

#[test]
fn every_promise_holds_under_faults_of_processes_pipes_and_clocks() {
    let (from, seeds) = seeds(SEEDS);
    (from..from + seeds).for_each(play::<World>);
}

/// Number of seeds unless `OUTLAST_SEEDS` sets another.
const SEEDS: u64 = 400;
/// Moves of processes until no more may be due, without time passing.
const SETTLE_MAX: u32 = 20_000;
/// Leaps to a deadline that is now: events planned for this moment come one after the other.
const STUCK_MAX: u32 = 100;
/// How long all that was asked may take to be answered once there are no more faults.
const REST_MAX: std::time::Duration = ms(600_000);
/// How long servers that were replaced may take to end, and calls of clients that left.
const QUIET: std::time::Duration = ms(130_000);
/// How long everything may take to end after it was told to.
const STOP_MAX: std::time::Duration = ms(25_000);

/// What all processes share.
pub(crate) struct Shared {
    pub kernel: Kernel,
    pub ledger: Ledger,
    pub http: Clients,
    /// When the store carries out its next operation.
    pub store_ready: Instant,
    /// The lists that relays have cached, by revision.
    pub cache: BTreeMap<String, String>,
    /// What relays start as their server.
    pub relay_server: What,
    seed: u64,
    questions: u64,
    /// Programs of processes that were started in this move.
    born: Vec<(Pid, What)>,
}

/// A program that a process can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Session,
    Agent,
    Relay,
    /// With a client on stdin.
    Gateway,
    /// With the HTTP front.
    HttpGateway,
    /// A server of the backend of this number.
    Server(u64),
}

enum Program {
    Session(Box<SessionProcess>),
    Agent(Agent),
    Relay(Box<RelayProcess>),
    Gateway(Box<GatewayProcess>),
    Server(Server),
}

#[derive(Clone, Copy)]
enum Move {
    Session(session_process::Move),
    Agent(agent::Move),
    Relay(relay_process::Move),
    Gateway(gateway_process::Move),
    Server(server::Move),
}

impl Shared {
    /// Starts a process. Its program makes its first move later.
    pub(crate) fn start(&mut self, what: What, parent: Pid, key: u64) -> Pid {
        self.start_below(what, Some(parent), key)
    }

    fn start_below(&mut self, what: What, parent: Option<Pid>, key: u64) -> Pid {
        let is_outlast = !matches!(what, What::Agent | What::Server(_));
        let dice = &mut self.kernel.dice;
        let lag = |dice: &mut Dice| Some(ms(dice.pick(&[0, 1, 30, 900, 1_500, 4_000]))).filter(|_| !dice.one_in(4));
        let reactions = Reactions {
            after_stdin: lag(dice),
            after_term: lag(dice),
            is_own: is_outlast,
            leaves_grandchild: matches!(what, What::Server(_)) && dice.one_in(6),
        };
        let fails = parent.is_some() && what != What::Relay && self.is_unlucky(25);
        let order = Order { parent, key, name: format!("{what:?}"), is_outlast, reactions, fails };
        let pid = self.kernel.spawn(order);
        if !fails {
            self.born.push((pid, what));
        }
        pid
    }

    pub(crate) fn next_question(&mut self) -> u64 {
        self.questions += 1;
        self.questions
    }

    /// Once in so many times, as long as there are faults.
    pub(crate) fn is_unlucky(&mut self, times: u64) -> bool {
        !self.kernel.is_calm && self.kernel.dice.one_in(times)
    }
}

struct World {
    shared: Shared,
    programs: BTreeMap<Pid, Program>,
    session: Pid,
    http_gateway: Pid,
    /// The conversations of HTTP sessions, in the order of `http.sessions`, and those of single requests, by response.
    conversations: Vec<Conversation>,
    singles: BTreeMap<Response, Conversation>,
    /// Leaps in a row that did not move the clock.
    stuck: u32,
}

impl Played for World {
    fn new(seed: u64) -> World {
        let mut kernel = Kernel::new(seed);
        let relay_server = kernel.dice.pick(&[What::Gateway, What::Gateway, What::Server(0)]);
        let store_ready = kernel.now;
        let shared = Shared {
            kernel,
            ledger: Ledger::default(),
            http: Clients::new(),
            store_ready,
            cache: BTreeMap::new(),
            relay_server,
            seed,
            questions: 0,
            born: Vec::new(),
        };
        let programs = BTreeMap::new();
        let (conversations, singles) = (Vec::new(), BTreeMap::new());
        World { shared, programs, session: 0, http_gateway: 0, conversations, singles, stuck: 0 }
    }

    fn story(&mut self) -> &mut Story {
        &mut self.shared.kernel.story
    }

    fn run(&mut self) {
        let steps = 300 + self.shared.kernel.dice.below(900);
        for _ in 0..steps {
            self.step();
            self.shared.kernel.check();
        }
        self.rest();
        self.check_watches();
        self.stay_quiet();
        self.stop();
    }
}

impl World {
    fn step(&mut self) {
        match self.shared.kernel.dice.below(100) {
            0..=64 => {
                self.turn();
            }
            65..=74 => self.client_speaks(),
            75..=84 => self.http_client_acts(),
            85..=89 => {
                let lag = self.shared.kernel.dice.below(20);
                self.pass_to(self.shared.kernel.now + ms(lag));
            }
            90..=96 => {
                self.settle();
                self.leap();
            }
            _ => self.fault(),
        }
    }

    // ---- processes ------------------------------------------------------------------------------

    /// Programs of new processes begin, and those of ended ones are dropped.
    fn register(&mut self) {
        while let Some((pid, what)) = self.shared.born.pop() {
            let shared = &mut self.shared;
            let seed = shared.seed ^ u64::from(pid) << 32;
            let program = match what {
                What::Session => Program::Session(Box::new(SessionProcess::new(pid, seed, shared))),
                What::Agent => Program::Agent(Agent::new(pid)),
                What::Relay => Program::Relay(Box::new(RelayProcess::new(pid, shared.relay_server, seed, shared))),
                What::Gateway => Program::Gateway(Box::new(GatewayProcess::new(pid, false, seed, shared))),
                What::HttpGateway => Program::Gateway(Box::new(GatewayProcess::new(pid, true, seed, shared))),
                What::Server(backend) => {
                    // The era belongs to the program, so all processes of one backend share it.
                    let (handshake, stateless) = match (shared.seed >> (2 * backend)) % 4 {
                        0 => (false, true),
                        1 => (true, true),
                        _ => (true, false),
                    };
                    let hangs = shared.is_unlucky(20);
                    let mcp = McpServer::new(handshake, stateless, &mut shared.kernel.dice);
                    Program::Server(Server::new(pid, backend, mcp, hangs))
                }
            };
            self.programs.insert(pid, program);
        }
        let kernel = &self.shared.kernel;
        self.programs.retain(|pid, _| kernel.runs(*pid));
        if !self.programs.contains_key(&self.http_gateway) && self.http_gateway != 0 {
            self.http_gateway = 0;
            let wall = self.shared.kernel.wall();
            self.shared.http.gateway_died(&mut self.shared.kernel.dice, wall);
            self.singles.clear();
        }
    }

    fn moves(&self) -> Vec<(Pid, Move)> {
        let mut moves = Vec::new();
        for (pid, program) in &self.programs {
            moves_of(program, &self.shared, |which| moves.push((*pid, which)));
        }
        moves
    }

    /// One process makes one move. False if none can.
    fn turn(&mut self) -> bool {
        self.register();
        let moves = self.moves();
        if moves.is_empty() {
            return false;
        }
        let (pid, which) = self.shared.kernel.dice.pick(&moves);
        self.make(pid, which);
        true
    }

    fn make(&mut self, pid: Pid, which: Move) {
        let Some(program) = self.programs.get_mut(&pid) else { return };
        let shared = &mut self.shared;
        match (program, which) {
            (Program::Session(session), Move::Session(which)) => session.turn(which, shared),
            (Program::Agent(agent), Move::Agent(which)) => agent.turn(which, shared),
            (Program::Relay(relay), Move::Relay(which)) => relay.turn(which, shared),
            (Program::Gateway(gateway), Move::Gateway(which)) => gateway.turn(which, shared),
            (Program::Server(server), Move::Server(which)) => server.turn(which, shared),
            _ => unreachable!("the move was made for this program"),
        }
        self.register();
    }

    /// All processes move until each waits for something.
    fn settle(&mut self) {
        for _ in 0..SETTLE_MAX {
            if !self.turn() {
                return;
            }
        }
        panic!("the processes never wait");
    }

    fn deadline(&self) -> Option<Instant> {
        let of = |program: &Program| match program {
            Program::Session(session) => session.deadline(),
            Program::Agent(_) => None,
            Program::Relay(relay) => relay.deadline(),
            Program::Gateway(gateway) => gateway.deadline(),
            Program::Server(server) => server.deadline(),
        };
        let store = Some(self.shared.store_ready).filter(|_| !self.shared.http.ops.is_empty());
        let due = self.programs.values().filter_map(of).chain(self.shared.kernel.next_plan()).chain(store).min()?;
        Some(due.max(self.shared.kernel.now))
    }

    /// Time passes to the next moment at which something is due.
    fn leap(&mut self) {
        if let Some(due) = self.deadline() {
            self.stuck = if due > self.shared.kernel.now { 0 } else { self.stuck + 1 };
            assert!(self.stuck < STUCK_MAX, "time does not pass: something is due, and no process does it");
            self.pass_to(due);
        }
    }

    fn pass_to(&mut self, to: Instant) {
        self.shared.kernel.pass_to(to);
        self.shared.http.check_store_time(self.shared.kernel.now);
        self.register();
    }

    // ---- faults ---------------------------------------------------------------------------------

    fn fault(&mut self) {
        self.register();
        let dice = &mut self.shared.kernel.dice;
        match dice.below(12) {
            0..=3 => self.kill_any(),
            4 | 5 => self.operate(),
            6 => {
                let jump = dice.pick(&[-3_600_000, -500, 500, 60_000, 7_200_000]);
                self.shared.kernel.jump_wall(jump);
            }
            7 => {
                let time = dice.pick(&[200, 1_000, 3_000]);
                self.shared.kernel.stall(ms(time));
                self.pass_to(self.shared.kernel.now);
            }
            _ => self.begin(),
        }
    }

    /// The session and the HTTP gateway are started, again if they ended.
    fn begin(&mut self) {
        if !self.programs.contains_key(&self.session) {
            self.session = self.shared.start_below(What::Session, None, 0);
        } else if self.http_gateway == 0 {
            self.http_gateway = self.shared.start_below(What::HttpGateway, None, 0);
        }
        self.register();
    }

    fn kill_any(&mut self) {
        let pids: Vec<Pid> = self.programs.keys().copied().collect();
        if pids.is_empty() {
            return;
        }
        let dice = &mut self.shared.kernel.dice;
        let pid = dice.pick(&pids);
        // A server may exit by itself, at any byte of a message.
        let exit = dice.pick(&[Exit::Signal(9), Exit::Code(1), Exit::Code(0), Exit::Code(42)]);
        let how = dice.below(3);
        let exits_itself = matches!(self.programs[&pid], Program::Server(_) | Program::Agent(_));
        match how {
            0 if exits_itself => self.shared.kernel.exit(pid, exit),
            1 => self.shared.kernel.terminate(pid),
            _ => self.shared.kernel.kill(pid),
        }
        self.register();
    }

    fn operate(&mut self) {
        let pids: Vec<Pid> = self.programs.keys().copied().collect();
        if pids.is_empty() {
            return;
        }
        let shared = &mut self.shared;
        let pid = shared.kernel.dice.pick(&pids);
        let at_once = shared.kernel.dice.one_in(4);
        match self.programs.get_mut(&pid) {
            Some(Program::Session(session)) => session.operate(shared),
            Some(Program::Relay(relay)) => relay.restart(at_once, shared),
            Some(Program::Gateway(gateway)) => gateway.operate(shared),
            Some(Program::Server(server)) => server.hangs = true,
            Some(Program::Agent(_)) | None => {}
        }
        self.register();
    }

    // ---- clients --------------------------------------------------------------------------------

    fn client_speaks(&mut self) {
        self.register();
        for program in self.programs.values_mut() {
            if let Program::Agent(agent) = program
                && agent.can_speak()
            {
                agent.turn(agent::Move::Speak, &mut self.shared);
            }
        }
    }

    fn on_gateway<T>(&mut self, act: impl FnOnce(&mut GatewayProcess, &mut Shared) -> T) -> Option<T> {
        let Some(Program::Gateway(gateway)) = self.programs.get_mut(&self.http_gateway) else { return None };
        let done = act(gateway, &mut self.shared);
        self.register();
        Some(done)
    }

    /// Tells the front what a client sent, unless no gateway runs.
    fn tell_front(&mut self, event: front::Event<Response>) {
        self.on_gateway(|gateway, shared| gateway.tell_front(event, shared));
    }

    fn http_client_acts(&mut self) {
        self.register();
        if !self.programs.contains_key(&self.http_gateway) {
            return;
        }
        match self.shared.kernel.dice.below(16) {
            0 | 1 => self.open_session(),
            2..=6 => self.post(),
            7 => self.post_alone(),
            8 => {
                if let Some(index) = self.any_session() {
                    self.listen(index);
                }
            }
            9 => {
                let broken = self.shared.http.break_off(&mut self.shared.kernel.dice);
                broken.into_iter().for_each(|event| self.tell_front(event));
            }
            10 => {
                let usable = self.shared.http.usable();
                if !usable.is_empty() {
                    let index = self.shared.kernel.dice.pick(&usable);
                    self.on_gateway(|gateway, shared| {
                        shared.http.probe(index, gateway.front.as_ref().expect("it has a front"));
                    });
                }
            }
            11 if self.shared.kernel.dice.one_in(8) => {
                if let Some(index) = self.any_session() {
                    let client = self.shared.http.sessions[index].client;
                    self.tell_front(front::Event::Ended { client });
                }
            }
            _ => {
                let unread = self.shared.http.unread();
                if !unread.is_empty() {
                    let response = self.shared.kernel.dice.pick(&unread);
                    self.read(response);
                }
            }
        }
    }

    /// A GET of a stream.
    fn listen(&mut self, index: usize) {
        let listened = self.on_gateway(|gateway, shared| {
            let front = gateway.front.as_ref().expect("it has a front");
            shared.http.listen(index, front, &mut shared.kernel.dice)
        });
        listened.flatten().into_iter().for_each(|event| self.tell_front(event));
    }

    /// Any session that its client may use. A session of an earlier gateway is restored.
    fn any_session(&mut self) -> Option<usize> {
        let usable = self.shared.http.usable();
        if usable.is_empty() {
            return None;
        }
        let index = self.shared.kernel.dice.pick(&usable);
        self.use_session(index).then_some(index)
    }

    fn use_session(&mut self, index: usize) -> bool {
        let found = self.on_gateway(|gateway, shared| {
            let front = gateway.front.as_ref().expect("it has a front");
            shared.http.find(index, front, &mut shared.kernel.dice)
        });
        match found {
            Some(Found::Open) => true,
            Some(Found::Stored(event)) => {
                self.tell_front(*event);
                let session = &self.shared.http.sessions[index];
                let (id, who) = (session.id, self.shared.http.people[session.who].clone());
                let is_there = self.on_gateway(|gateway, _| {
                    let front = gateway.front.as_ref().expect("it has a front");
                    front.session(id.expect("it is usable"), &who).is_some()
                });
                assert_eq!(is_there, Some(true), "session {index} was not restored");
                true
            }
            // Its record may have been lost, or have expired by the wall clock.
            Some(Found::Lost) | None => false,
        }
    }

    fn open_session(&mut self) {
        let who = self.shared.kernel.dice.below(2) as usize;
        let has_room = self.on_gateway(|gateway, shared| {
            gateway.front.as_ref().expect("it has a front").has_room(&shared.http.people[who], true).is_ok()
        });
        if has_room != Some(true) {
            return;
        }
        let Shared { kernel, ledger, http, .. } = &mut self.shared;
        let mut conversation = Conversation::new(true, true, ledger);
        let message = conversation.initialize(ledger, &mut kernel.dice).to_string();
        let event = http.open(who, message.into(), &mut kernel.dice);
        self.conversations.push(conversation);
        self.tell_front(event);
    }

    fn post(&mut self) {
        let Some(index) = self.any_session() else { return };
        let Shared { kernel, ledger, .. } = &mut self.shared;
        if let Some(said) = self.conversations[index].act(ledger, &mut kernel.dice) {
            self.send(index, &said);
        }
    }

    /// A session sends a message.
    fn send(&mut self, index: usize, said: &Value) {
        let http = &mut self.shared.http;
        let client = http.sessions[index].client;
        let message = Bytes::from(said.to_string());
        let event = match message::parse(&message) {
            Ok(Message::Request { method, params, .. }) => {
                let id = said["id"].as_i64().expect("its ids are numbers").into();
                assert_eq!(http.next_id(index), id, "the conversation counts its requests as the session does");
                http.post(index, vec![(id, message.clone(), Change::of(&method, &params))])
            }
            _ if said["method"] == "notifications/cancelled" => {
                let id = said["params"]["requestId"].as_i64().expect("its ids are numbers");
                http.cancel(index, id.into())
            }
            _ => front::Event::Noted { client, messages: vec![message] },
        };
        self.tell_front(event);
    }

    fn post_alone(&mut self) {
        let Shared { kernel, ledger, .. } = &mut self.shared;
        let mut conversation = Conversation::new(false, true, ledger);
        let request = conversation.request(ledger, &mut kernel.dice);
        self.send_alone(conversation, &request);
    }

    /// A single request, or a retry of it.
    fn send_alone(&mut self, conversation: Conversation, request: &Value) {
        // One person asks, and tries again.
        let who = (conversation.asker % 2) as usize;
        let event = self.shared.http.post_alone(who, request.to_string().into());
        let response = self.shared.http.singles.last().expect("just made").response;
        self.singles.insert(response, conversation);
        self.tell_front(event);
    }

    /// A client reads an event or a body, and may answer at once.
    fn read(&mut self, response: Response) {
        let (client, messages) = self.shared.http.read(response);
        let index = self.shared.http.sessions.iter().position(|session| session.client == client);
        for message in messages {
            let said: Value = serde_json::from_slice(&message).expect("a front sends JSON");
            self.shared.kernel.tell(&format!("client {client} reads"), &said);
            let Shared { kernel, ledger, .. } = &mut self.shared;
            let Some(index) = index else {
                let Some(mut conversation) = self.singles.remove(&response) else { continue };
                match conversation.hear(&said, ledger, &mut kernel.dice) {
                    Some(again) => self.send_alone(conversation, &again),
                    None => drop(self.singles.insert(response, conversation)),
                }
                continue;
            };
            let reply = self.conversations[index].hear(&said, ledger, &mut kernel.dice);
            if let Some(reply) = reply
                && self.shared.http.usable().contains(&index)
                && self.use_session(index)
            {
                self.send(index, &reply);
            }
        }
    }

    // ---- rest and stop --------------------------------------------------------------------------

    /// There are no more faults: everything that was asked is answered, or its connection has ended.
    fn rest(&mut self) {
        self.shared.kernel.is_calm = true;
        self.wake_servers_of_relays();
        // A session with an open stream does not expire.
        for index in self.shared.http.usable() {
            if self.use_session(index) {
                self.listen(index);
            }
        }
        let until = self.shared.kernel.now + REST_MAX;
        loop {
            self.settle();
            while let Some(response) = self.shared.http.unread().first() {
                self.read(*response);
                self.settle();
            }
            self.answer_questions();
            self.shared.kernel.check();
            let waits = self.waits_for();
            let Some(waits) = waits else { return };
            assert!(self.shared.kernel.now < until, "{waits}");
            assert!(self.deadline().is_some(), "{waits}, and nothing will happen any more");
            self.leap();
        }
    }

    /// A relay without a timeout waits for a server that hangs, as its client would without a relay.
    fn wake_servers_of_relays(&mut self) {
        let relays: Vec<Pid> = self
            .programs
            .iter()
            .filter(|(_, program)| matches!(program, Program::Relay(_)))
            .map(|(pid, _)| *pid)
            .collect();
        for (pid, program) in &mut self.programs {
            if let Program::Server(server) = program {
                let parent = self.shared.kernel.get(*pid).and_then(|process| process.parent);
                server.hangs &= !parent.is_some_and(|parent| relays.contains(&parent));
            }
        }
    }

    fn answer_questions(&mut self) {
        for index in self.shared.http.usable() {
            while self.conversations[index].is_questioned() && self.use_session(index) {
                let said = self.conversations[index].answer_question(&mut self.shared.kernel.dice);
                said.into_iter().for_each(|said| self.send(index, &said));
                self.settle();
            }
        }
    }

    /// What is not answered, as one sentence.
    fn waits_for(&self) -> Option<String> {
        for (pid, program) in &self.programs {
            let is_asked = match program {
                Program::Session(session) => session.is_asked(),
                Program::Relay(relay) => relay.is_asked(),
                Program::Gateway(gateway) => gateway.is_asked(),
                Program::Agent(agent) => {
                    if let Some(number) = agent.conversation().and_then(|conversation| conversation.waits_for().next())
                    {
                        return Some(format!("request {number} of agent {pid} is not answered"));
                    }
                    false
                }
                Program::Server(_) => false,
            };
            if is_asked {
                return Some(format!("an operator waits for process {pid}"));
            }
        }
        let http = &self.shared.http;
        let is_lost = |response: &Response| {
            let seen = &http.responses[response];
            seen.is_broken || seen.head == Some(Head::Refused)
        };
        for session in http.sessions.iter().filter(|session| !session.is_over) {
            if let Some((id, _)) = session.open.iter().find(|(_, (response, _))| !is_lost(response)) {
                return Some(format!("request {id} of session {} is not answered", session.client));
            }
        }
        let waits = |(response, conversation): (&Response, &Conversation)| {
            !is_lost(response) && conversation.waits_for().next().is_some()
        };
        self.singles
            .iter()
            .find(|single| waits(*single))
            .map(|(response, _)| format!("response {response} is not sent"))
    }

    /// HTTP clients leave, and nothing more is asked: servers that were replaced end, and no state of ended requests is
    /// kept.
    fn stay_quiet(&mut self) {
        while let Some(event) = self.shared.http.break_off(&mut self.shared.kernel.dice) {
            self.tell_front(event);
        }
        let until = self.shared.kernel.now + QUIET;
        while self.shared.kernel.now < until {
            self.settle();
            let due = self.deadline().map_or(until, |due| due.min(until));
            self.pass_to(due);
            self.shared.kernel.check();
        }
        for program in self.programs.values() {
            match program {
                Program::Relay(relay) => relay.check_rest(),
                Program::Gateway(gateway) => gateway.check_rest(self.shared.kernel.now),
                Program::Session(_) | Program::Agent(_) | Program::Server(_) => {}
            }
        }
    }

    /// A shared backend that runs reports the resources that clients are subscribed to, whatever happened before.
    fn check_watches(&self) {
        let Some(Program::Gateway(gateway)) = self.programs.get(&self.http_gateway) else { return };
        let servers = self.programs.values().filter_map(|program| match program {
            // One whose lists the gateway has read.
            Program::Server(server) if server.is_open && server.is_idle() => Some(server),
            _ => None,
        });
        for server in servers {
            let is_shared = gateway.backend_of(server.pid).is_some_and(|backend| backend.children == Children::Shared);
            for (index, session) in self.shared.http.sessions.iter().enumerate() {
                // A stored session has no subscription until its client comes back, and a record may be lost.
                let is_live = !session.is_over && !session.is_unrecorded && gateway.has_client(session.client);
                let uris = self.conversations[index].watches.iter().filter(|_| is_shared && is_live);
                for uri in uris.filter(|uri| uri.starts_with(&format!("r://{}/", server.backend))) {
                    assert!(
                        server.mcp.watched().contains(uri),
                        "server {} does not report {uri}, to which session {} is subscribed",
                        server.pid,
                        session.client
                    );
                }
            }
        }
    }

    fn stop(&mut self) {
        // An operator may ask for something in the last moment.
        if let Some(Program::Session(session)) = self.programs.get_mut(&self.session) {
            session.operate(&mut self.shared);
        }
        self.shared.kernel.terminate(self.session);
        self.shared.kernel.terminate(self.http_gateway);
        let until = self.shared.kernel.now + STOP_MAX;
        loop {
            self.settle();
            if self.shared.kernel.is_empty() {
                return;
            }
            let left: Vec<String> =
                self.shared.kernel.running().map(|(pid, process)| format!("{pid} ({})", process.name)).collect();
            assert!(self.shared.kernel.now < until, "{left:?} do not end");
            assert!(self.deadline().is_some(), "{left:?} do not end, and nothing will happen any more");
            self.leap();
        }
    }
}

fn moves_of(program: &Program, shared: &Shared, mut add: impl FnMut(Move)) {
    macro_rules! each {
        ($program:expr, $kind:ident) => {{
            let mut moves = Vec::new();
            $program.moves(shared, &mut moves);
            moves.into_iter().for_each(|which| add(Move::$kind(which)));
        }};
    }
    match program {
        Program::Session(session) => each!(session, Session),
        Program::Agent(agent) => each!(agent, Agent),
        Program::Relay(relay) => each!(relay, Relay),
        Program::Gateway(gateway) => each!(gateway, Gateway),
        Program::Server(server) => each!(server, Server),
    }
}
