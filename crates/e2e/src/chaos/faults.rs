//! Carries out the faults of a plan on the processes of the world.

use std::{
    io::Write,
    net::TcpStream,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::json;

use super::{
    http::Http,
    ledger::HUNG_AFTER,
    machine::set_limit,
    message::Request,
    plan::{Fault, Kind, Part},
    processes::{self, Process},
    world::{BACKENDS, World},
};

/// How long the target process may take to appear: it may be in a restart.
const TARGET_WAIT: Duration = Duration::from_secs(2);
/// After this time without a server the operator restarts it: delays of the crash policy grow to 10 s.
const HELP_AFTER: Duration = Duration::from_millis(1500);
/// Connections that are opened while no descriptor is left.
const CONNECTIONS: usize = 40;
/// outlast is stopped for at least this long: longer than its call timeout.
const STOP_OUTLAST: Duration = Duration::from_millis(4500);

/// Carries out the faults of one part.
pub(super) struct Injector<'a> {
    pub world: &'a World,
    pub part: Part,
    /// A client of the gateway.
    http: Option<Http>,
}

impl<'a> Injector<'a> {
    pub(super) fn new(world: &'a World, part: Part) -> Injector<'a> {
        let mut injector = Injector { world, part, http: None };
        if part == Part::Gateway {
            // A call to each backend, so that each backend with a process per session has the process of this client
            // from the start.
            for choice in 0..BACKENDS.len() as u64 {
                injector.call(choice, "echo", json!({}));
            }
        }
        injector
    }

    /// False if the target process did not exist.
    pub(super) fn apply(&mut self, fault: &Fault) -> bool {
        let lasts = Duration::from_millis(fault.lasts_ms);
        let is_done = match fault.kind {
            Kind::KillServer => self.server(fault).is_some_and(|server| server.signal(Signal::SIGKILL)),
            Kind::StopServer => stop(self.server(fault), lasts),
            Kind::KillMonitor => self.monitor(fault).is_some_and(|monitor| monitor.signal(Signal::SIGKILL)),
            Kind::StopMonitor => self.monitor(fault).is_some_and(|monitor| monitor.signal(Signal::SIGSTOP)),
            Kind::KillKeeper => self.keeper().is_some_and(|keeper| keeper.signal(Signal::SIGKILL)),
            Kind::StopKeeper => self.keeper().is_some_and(|keeper| keeper.signal(Signal::SIGSTOP)),
            Kind::StopOutlast => stop(self.world.process(self.part), STOP_OUTLAST + lasts),
            Kind::Exit42 => {
                self.call(fault.choice, "exit", json!({"code": 42, "answer": fault.choice.is_multiple_of(2)}))
            }
            Kind::Crash => self.call(fault.choice, "crash", json!({"code": 1 + fault.choice % 200})),
            Kind::Hang => self.call(fault.choice, "hang", json!({})),
            Kind::AnswerTwice => self.call(fault.choice, "answer_twice", json!({})),
            Kind::Garbage => self.garbage(fault),
            Kind::Stray => {
                let stray = json!({"setsid": true, "ignore_term": true, "clear_env": true});
                self.call(fault.choice, "grandchild", stray)
                    && self
                        .target(|outlast| self.has_stray(outlast))
                        .is_some_and(|server| server.signal(Signal::SIGKILL))
            }
            Kind::SlowClient => self.slow_client(fault, lasts),
            Kind::EditSource => self.edit_source(fault, lasts),
            Kind::EditConfig => self.edit_config(fault, lasts),
            Kind::KillOutlast => self.kill_outlast(),
            Kind::Vanish => self.vanish(fault),
            Kind::Descriptors => self.descriptors(lasts),
            Kind::Restart => {
                let name = match (self.part, fault.choice % 4) {
                    (Part::Gateway, backend @ 0..3) => format!("gateway/{}", BACKENDS[backend as usize]),
                    (part, _) => part.name().to_owned(),
                };
                self.world.ask(&["restart", &name]).is_ok()
            }
            Kind::Halt => self.halt(),
            Kind::Viewers => self.viewers(lasts),
            Kind::FullDisk => self.full_disk(lasts),
            Kind::ClockForward => self.set_clock(fault, 1),
            Kind::ClockBack => self.set_clock(fault, -1),
        };
        self.recover();
        is_done
    }

    /// Checks that the part recovers, and that its control socket answers.
    fn recover(&self) {
        match self.part {
            Part::Machine => return,
            Part::Session => self.world.until_ready(),
            Part::Relay | Part::ShortRelay => {
                // An operator who knows that the server works does not wait for the delay of the crash policy.
                let is_up = || self.outlast().is_some_and(|outlast| !self.world.servers(outlast).is_empty());
                if !within(HELP_AFTER, is_up) {
                    let _ = self.world.ask(&["resume", self.part.name()]);
                }
            }
            Part::Gateway | Part::ShortGateway => {}
        }
        self.world.check_socket(self.part);
    }

    // ---- targets

    fn outlast(&self) -> Option<Process> {
        self.world.process(self.part)
    }

    fn target(&self, mut find: impl FnMut(Process) -> Option<Process>) -> Option<Process> {
        let outlast = self.outlast()?;
        let mut found = None;
        within(TARGET_WAIT, || {
            found = find(outlast);
            found.is_some()
        });
        found
    }

    fn server(&self, fault: &Fault) -> Option<Process> {
        self.target(|outlast| {
            let servers = self.world.servers(outlast);
            servers.get(fault.choice as usize % servers.len().max(1)).copied()
        })
    }

    /// A server that has started a process.
    fn has_stray(&self, outlast: Process) -> Option<Process> {
        self.world.servers(outlast).into_iter().find(|server| !processes::children(server.pid).is_empty())
    }

    fn monitor(&self, fault: &Fault) -> Option<Process> {
        self.world.monitor(self.server(fault)?)
    }

    fn keeper(&self) -> Option<Process> {
        self.target(|outlast| self.world.keeper(outlast))
    }

    // ---- calls

    /// Makes a harmful call, and waits for its answer.
    fn call(&mut self, choice: u64, tool: &str, arguments: serde_json::Value) -> bool {
        match self.part {
            Part::Gateway => {
                let backend = BACKENDS[choice as usize % BACKENDS.len()];
                let request = Request::tool(format!("{backend}__{tool}"), arguments);
                self.http().is_some_and(|http| http.call(&request).is_some())
            }
            part => {
                let Some(connection) = self.world.connection(part) else { return false };
                let prefix = if part == Part::ShortGateway { "a__" } else { "" };
                let Some(call) = connection.send(&Request::tool(format!("{prefix}{tool}"), arguments)) else {
                    return false;
                };
                self.world.ledger.wait(call)
            }
        }
    }

    fn http(&mut self) -> Option<&mut Http> {
        if self.http.is_none() {
            match Http::open(&self.world.address(), &self.world.ledger) {
                Ok(http) => self.http = Some(http),
                Err(error) => self.world.ledger.breach(format!("gateway: no session: {error}")),
            }
        }
        self.http.as_mut()
    }

    fn garbage(&mut self, fault: &Fault) -> bool {
        let deep = "[".repeat(15_000);
        let texts = [
            "this is no JSON",
            "{\"jsonrpc\":\"2.0\",",
            "{\"jsonrpc\":\"2.0\",\"id\":\"of no request\",\"result\":{}}",
            "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"content\":[]}}",
            "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\",\"params\":{\"level\":\"info\",\"data\":1}}",
            "",
            "\u{0}\u{1b}[2J\u{fffd}",
            &deep,
        ];
        let mut is_done = true;
        for offset in 0..3 {
            let text = texts[(fault.choice as usize + offset) % texts.len()];
            is_done &= self.call(fault.choice, "garbage", json!({"text": text}));
        }
        is_done
    }

    /// Answers arrive while the client does not read, or reads slowly.
    fn slow_client(&mut self, fault: &Fault, lasts: Duration) -> bool {
        if self.part == Part::Gateway {
            let Ok(mut http) = Http::open(&self.world.address(), &self.world.ledger) else { return false };
            http.read_slowly(lasts / 60);
            let backend = BACKENDS[fault.choice as usize % 2];
            return http.call(&Request::tool(format!("{backend}__big"), json!({"bytes": 1_000_000}))).is_some();
        }
        let Some(connection) = self.world.connection(self.part) else { return false };
        connection.read_nothing_for(lasts);
        let calls: Vec<u64> =
            (0..6).filter_map(|_| connection.send(&Request::tool("big", json!({"bytes": 500_000})))).collect();
        !calls.is_empty() && calls.into_iter().all(|call| self.world.ledger.wait(call))
    }

    // ---- files

    fn edit_source(&self, fault: &Fault, lasts: Duration) -> bool {
        self.world.write_source(fault.choice);
        thread::sleep(lasts);
        if !fault.choice.is_multiple_of(3) {
            self.world.write_broken_source(fault.choice + 1);
            thread::sleep(lasts);
            self.world.write_source(fault.choice + 2);
        }
        true
    }

    fn edit_config(&self, fault: &Fault, lasts: Duration) -> bool {
        let in_place = fault.choice.is_multiple_of(2);
        self.world.write_config(fault.choice, in_place);
        thread::sleep(lasts / 2);
        self.world.write_broken_config(fault.choice, in_place);
        thread::sleep(lasts / 2);
        self.world.write_config(fault.choice + 1, !in_place);
        true
    }

    // ---- the end of a client or of outlast

    /// Ends an outlast with SIGKILL: no process below it may be left. It is started again.
    fn kill_outlast(&self) -> bool {
        let Some(outlast) = self.outlast() else { return false };
        let connection = self.world.connection(self.part);
        if let Some(connection) = &connection {
            connection.give_up();
        }
        let mut all = processes::below(outlast.pid);
        all.push(outlast);
        if !outlast.signal(Signal::SIGKILL) {
            return false;
        }
        if let Some(connection) = connection {
            connection.vanish();
            connection.wait();
        }
        self.must_be_gone(&all);
        self.start_again();
        true
    }

    fn vanish(&mut self, fault: &Fault) -> bool {
        if self.part == Part::Gateway {
            return self.vanish_from_gateway(fault);
        }
        let (Some(outlast), Some(connection)) = (self.outlast(), self.world.connection(self.part)) else {
            return false;
        };
        let mut all = processes::below(outlast.pid);
        all.push(outlast);
        if fault.choice.is_multiple_of(2) {
            connection.vanish();
        } else {
            // Closes stdin, as a client that exits. Its answers are still read.
            connection.give_up();
            connection.close_stdin();
        }
        if connection.wait().is_none() {
            self.world.ledger.breach(format!("{}: it goes on without its client", self.part.name()));
        }
        self.must_be_gone(&all);
        self.start_again();
        true
    }

    /// Several clients disconnect, each with an open call.
    fn vanish_from_gateway(&self, fault: &Fault) -> bool {
        let address = self.world.address();
        for number in 0..4 {
            let tool = format!("{}__sleep", BACKENDS[(fault.choice as usize + number) % 2]);
            let request = Request::tool(tool, json!({"ms": 300}));
            match number % 2 {
                0 => Http::stateless(&address, &self.world.ledger).vanish(&request),
                _ => match Http::open(&address, &self.world.ledger) {
                    Ok(http) => http.vanish(&request),
                    Err(error) => self.world.ledger.breach(format!("gateway: no session: {error}")),
                },
            }
        }
        true
    }

    fn start_again(&self) {
        match self.part {
            Part::Session => self.world.start_session(),
            part => self.world.connect(part),
        }
    }

    fn must_be_gone(&self, processes: &[Process]) {
        for left in processes::wait_gone(processes, HUNG_AFTER) {
            let (part, command) = (self.part.name(), left.command());
            self.world.ledger.breach(format!("{part}: process {} was left behind: {command}", left.pid));
        }
    }

    // ---- limits

    /// Sets the limit of descriptors below the number that outlast has, while clients connect.
    fn descriptors(&mut self, lasts: Duration) -> bool {
        let Some(outlast) = self.outlast() else { return false };
        let ledger = Arc::clone(&self.world.ledger);
        let before = limit_of_descriptors(outlast);
        if let Err(problem) = set_limit(&[outlast], "nofile", "16") {
            ledger.breach(format!("gateway: {problem}"));
            return false;
        }
        let address = self.world.address();
        let connections: Vec<TcpStream> = (0..CONNECTIONS)
            .filter_map(|_| {
                let mut stream = TcpStream::connect(&address).ok()?;
                stream.write_all(b"POST /mcp HTTP/1.1\r\n").ok()?;
                Some(stream)
            })
            .collect();
        // A backend that crashes now cannot be started.
        let backend = self.world.servers(outlast).first().copied();
        let is_done = backend.is_some_and(|server| server.signal(Signal::SIGKILL));
        thread::sleep(lasts);
        drop(connections);
        if let Err(problem) = set_limit(&[outlast], "nofile", &before) {
            ledger.breach(format!("gateway: {problem}"));
        }
        is_done
    }

    // ---- session

    /// Kills the agent until the session is halted. `restart` skips the delays between.
    fn halt(&self) -> bool {
        let outcome = self.world.until("the session to be halted", || {
            let state = self.world.session_state()?;
            match state["state"].as_str() {
                Some("halted") => return Some(()),
                Some("ready") => {
                    let agent = state["pid"].as_u64().and_then(|pid| Process::of(u32::try_from(pid).ok()?));
                    let agent = agent.filter(|agent| agent.signal(Signal::SIGKILL))?;
                    let _ = processes::wait_gone(&[agent], HUNG_AFTER);
                }
                _ => drop(self.world.ask(&["restart", "session"])),
            }
            None
        });
        if outcome.is_none() {
            let state = self.world.session_state();
            self.world.ledger.breach(format!("session: it is never halted: {state:?}"));
        }
        outcome.is_some()
    }

    fn viewers(&self, lasts: Duration) -> bool {
        let mut viewers: Vec<_> = (0..3).filter_map(|_| self.world.viewer().ok()).collect();
        thread::sleep(lasts);
        let is_done = !viewers.is_empty();
        let _ = self.world.ask(&["inject", "session", "words", "--enter"]);
        let all: Vec<Process> = viewers.iter().flat_map(|viewer| processes::below(viewer.id())).collect();
        for viewer in &mut viewers {
            let _ = viewer.kill().and_then(|()| viewer.wait());
        }
        // The terminals end with `script`.
        self.must_be_gone(&all);
        is_done
    }

    // ---- machine

    fn full_disk(&self, lasts: Duration) -> bool {
        let outlasts = self.world.outlasts();
        let filled = self.world.disk.fill(&outlasts);
        thread::sleep(lasts);
        let freed = self.world.disk.free(&outlasts);
        if let Err(problem) = filled.clone().and(freed) {
            self.world.ledger.breach(format!("machine: {problem}"));
        }
        filled.is_ok()
    }

    fn set_clock(&self, fault: &Fault, sign: i64) -> bool {
        let Some(clock) = &self.world.clock else { return false };
        clock.set(sign * 60 * fault.choice as i64);
        true
    }
}

fn stop(process: Option<Process>, lasts: Duration) -> bool {
    let Some(process) = process else { return false };
    let is_stopped = process.signal(Signal::SIGSTOP);
    thread::sleep(lasts);
    process.signal(Signal::SIGCONT);
    is_stopped
}

/// Whether a condition becomes true within a time.
fn within(time: Duration, mut look: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + time;
    loop {
        if look() {
            return true;
        }
        if deadline < Instant::now() {
            return false;
        }
        thread::sleep(Duration::from_millis(25));
    }
}

/// The soft limit, in the format of `prlimit`.
fn limit_of_descriptors(process: Process) -> String {
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", process.pid)).unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"));
    line.and_then(|line| line.split_whitespace().next()).unwrap_or("1024").to_owned()
}
