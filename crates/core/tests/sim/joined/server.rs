//! A server process: it reads lines, thinks for a while, and writes answers, progress, requests and invalid lines. It may hang
//! or crash in the middle of a line.

use std::time::Instant;

use bytes::Bytes;
use outlast_core::exit::Exit;
use serde_json::{Value, json};

use super::Shared;
use crate::{
    kernel::{Lines, Outbox, Pid, Read},
    mcp_server::{McpServer, Turn, Work},
    ms,
};

/// A server with more than this in its queue does not read: it is blocked in a write.
const BLOCKED: usize = 200;

pub(crate) struct Server {
    pub pid: Pid,
    pub mcp: McpServer,
    /// The number of its backend.
    pub backend: u64,
    /// Reads and answers nothing.
    pub hangs: bool,
    /// Its handshake is done.
    pub is_open: bool,
    lines: Lines,
    outbox: Outbox,
    stdin_ended: bool,
    plans: Vec<(Instant, Doing)>,
}

#[derive(Debug, Clone)]
enum Doing {
    Answer(Value),
    Progress,
    Ask,
    Withdraw,
    Log,
    ChangeTools,
    Update,
    Nonsense,
    Exit(Exit),
}

#[derive(Clone, Copy)]
pub(crate) enum Move {
    Read,
    Write,
    Do,
}

impl Server {
    pub(crate) fn new(pid: Pid, backend: u64, mcp: McpServer, hangs: bool) -> Server {
        Server {
            pid,
            mcp,
            backend,
            hangs,
            is_open: false,
            lines: Lines::default(),
            outbox: Outbox::default(),
            stdin_ended: false,
            plans: Vec::new(),
        }
    }

    /// Every request is answered, but for subscriptions.
    pub(crate) fn is_idle(&self) -> bool {
        !self.hangs && self.mcp.open.iter().all(|work| work.method == "subscriptions/listen")
    }

    pub(crate) fn moves(&self, shared: &Shared, moves: &mut Vec<Move>) {
        let kernel = &shared.kernel;
        if self.hangs {
            return;
        }
        if !self.stdin_ended && self.outbox.bytes() < BLOCKED && kernel.can_read_stdin(self.pid) {
            moves.push(Move::Read);
        }
        if !self.outbox.is_empty() && kernel.can_write_stdout(self.pid) {
            moves.push(Move::Write);
        }
        if self.deadline().is_some_and(|due| due <= kernel.now) {
            moves.push(Move::Do);
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.plans.iter().map(|(at, _)| *at).min().filter(|_| !self.hangs)
    }

    pub(crate) fn turn(&mut self, which: Move, shared: &mut Shared) {
        match which {
            Move::Read => self.read(shared),
            Move::Write => {
                // A closed pipe ends it, as SIGPIPE does.
                let (pid, kernel) = (self.pid, &mut shared.kernel);
                if !self.outbox.flush(|bytes| kernel.write_stdout(pid, bytes)) {
                    kernel.exit(pid, Exit::Signal(13));
                }
            }
            Move::Do => {
                let due = self.plans.iter().position(|(at, _)| *at <= shared.kernel.now);
                if let Some(index) = due {
                    let (_, doing) = self.plans.remove(index);
                    self.act(doing, shared);
                }
            }
        }
    }

    fn read(&mut self, shared: &mut Shared) {
        match shared.kernel.read_stdin(self.pid) {
            Read::Nothing => {}
            Read::Bytes(bytes) => {
                self.lines.add(&bytes);
                while let Some(line) = self.lines.next_line() {
                    self.hear(&line, shared);
                }
            }
            Read::End => {
                self.stdin_ended = true;
                let lag = shared.kernel.get(self.pid).and_then(|process| process.reactions.after_stdin);
                lag.into_iter().for_each(|lag| shared.kernel.exit_after(self.pid, lag, Exit::Code(0)));
            }
        }
    }

    fn hear(&mut self, line: &[u8], shared: &mut Shared) {
        let said: Value = serde_json::from_slice(line).unwrap_or_else(|error| panic!("not JSON ({error}): {line:?}"));
        let is_calm = shared.kernel.is_calm;
        if said.get("method").is_none() {
            return self.mcp.hear_answer(&said);
        }
        let Some(id) = said.get("id") else {
            if said["method"] == "notifications/cancelled" {
                self.mcp.hear_cancelled(&said["params"]["requestId"], is_calm, shared.kernel.now);
            }
            return;
        };
        let work = Work::of(&said);
        let is_twice = self.mcp.open.iter().any(|work| work.id == *id);
        assert!(!is_twice, "server {} got the id {id} twice", self.pid);
        if let Some(number) = work.number.filter(|_| !work.is_retry()) {
            shared.ledger.execute(number);
        }
        let is_call = work.number.is_some();
        self.mcp.open.push(work);
        let dice = &mut shared.kernel.dice;
        let think = match is_call {
            true if !is_calm && dice.one_in(20) => 20_000,
            true => dice.pick(&[0, 0, 5, 50, 300, 1_500]),
            false if !is_calm && dice.one_in(40) => 3_000,
            false => dice.pick(&[0, 0, 0, 5, 50]),
        };
        let mut plans = vec![(think, Doing::Answer(id.clone()))];
        if is_call && !is_calm && dice.one_in(2) {
            let exit = dice.pick(&[Exit::Code(1), Exit::Signal(11), Exit::Signal(9)]);
            let doing = dice.pick(&[
                Doing::Progress,
                Doing::Progress,
                Doing::Ask,
                Doing::Ask,
                Doing::Withdraw,
                Doing::Log,
                Doing::ChangeTools,
                Doing::Update,
                Doing::Update,
                Doing::Nonsense,
                Doing::Exit(exit),
            ]);
            plans.push((dice.below(think + 2), doing));
        }
        let now = shared.kernel.now;
        self.plans.extend(plans.into_iter().map(|(lag, doing)| (now + ms(lag), doing)));
    }

    fn act(&mut self, doing: Doing, shared: &mut Shared) {
        let now = shared.kernel.now;
        let is_calm = shared.kernel.is_calm;
        let dice = &mut shared.kernel.dice;
        let by = u64::from(self.pid);
        let said = match doing {
            Doing::Answer(id) => {
                let Some(index) = self.mcp.open.iter().position(|work| work.id == id) else { return };
                self.is_open |= ["tools/list", "tools/call"].contains(&&*self.mcp.open[index].method);
                let asks = (!is_calm && dice.one_in(6)).then(|| shared.next_question());
                let fails = !is_calm && shared.kernel.dice.one_in(12);
                self.mcp.answer(index, &Turn { by, backend: self.backend, asks, fails })
            }
            Doing::Progress => self.mcp.progress(),
            Doing::Ask if !self.mcp.handshake => None,
            Doing::Ask => {
                let number = shared.next_question();
                self.mcp.ask(number, by, &mut shared.kernel.dice, now).map(|(said, _)| said)
            }
            Doing::Withdraw => self.mcp.withdraw(),
            Doing::Log => {
                let params = json!({"level": "error", "data": by});
                Some(json!({"jsonrpc": "2.0", "method": "notifications/message", "params": params}))
            }
            Doing::ChangeTools => {
                self.mcp.tools = dice.below(3);
                Some(json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}))
            }
            Doing::Update => {
                let watched: Vec<String> = self.mcp.watched().into_iter().collect();
                let uri = (!watched.is_empty()).then(|| dice.pick(&watched));
                uri.map(|uri| json!({"jsonrpc": "2.0", "method": "notifications/resources/updated", "params": {"uri": uri}}))
            }
            Doing::Nonsense => return self.outbox.put(Bytes::from_static(b"oops\n"), None),
            Doing::Exit(exit) => return shared.kernel.exit(self.pid, exit),
        };
        if let Some(said) = said {
            self.outbox.put(Bytes::from(format!("{said}\n")), None);
        }
    }
}
