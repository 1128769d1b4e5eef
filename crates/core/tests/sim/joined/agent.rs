//! An agent: the process that a session runs, and the client of a relay that it starts itself.

use bytes::Bytes;
use outlast_core::exit::Exit;
use serde_json::Value;

use super::{Shared, What, conversation::Conversation};
use crate::kernel::{FromChild, Lines, Outbox, Pid, Read, ToChild};

pub(crate) struct Agent {
    pid: Pid,
    /// What it tells its terminal.
    screen: Outbox,
    connection: Option<Connection>,
    relays: u64,
    stdin_ended: bool,
}

struct Connection {
    conversation: Conversation,
    to: ToChild,
    from: FromChild,
    lines: Lines,
    outbox: Outbox,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Move {
    ReadTerminal,
    WriteTerminal,
    News,
    Connect,
    Read,
    Write,
    Speak,
    Answer,
}

impl Agent {
    pub(crate) fn new(pid: Pid) -> Agent {
        let mut screen = Outbox::default();
        screen.put(Bytes::from_static(b"> \n"), None);
        Agent { pid, screen, connection: None, relays: 0, stdin_ended: false }
    }

    pub(crate) fn conversation(&self) -> Option<&Conversation> {
        self.connection.as_ref().map(|connection| &connection.conversation)
    }

    pub(crate) fn moves(&self, shared: &Shared, moves: &mut Vec<Move>) {
        let kernel = &shared.kernel;
        if !self.stdin_ended && kernel.can_read_stdin(self.pid) {
            moves.push(Move::ReadTerminal);
        }
        if !self.screen.is_empty() && kernel.can_write_stdout(self.pid) {
            moves.push(Move::WriteTerminal);
        }
        if kernel.has_news(self.pid) {
            moves.push(Move::News);
        }
        match &self.connection {
            None if self.relays < 2 && !kernel.is_calm => moves.push(Move::Connect),
            None => {}
            Some(connection) => {
                if connection.from.is_readable(kernel) {
                    moves.push(Move::Read);
                }
                if !connection.outbox.is_empty() && connection.to.is_writable(kernel) {
                    moves.push(Move::Write);
                }
                if connection.conversation.is_questioned() && kernel.is_calm {
                    moves.push(Move::Answer);
                }
            }
        }
    }

    /// It may say something without being asked.
    pub(crate) fn can_speak(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.outbox.is_empty())
    }

    pub(crate) fn turn(&mut self, which: Move, shared: &mut Shared) {
        match which {
            Move::ReadTerminal => {
                if shared.kernel.read_stdin(self.pid) == Read::End {
                    self.stdin_ended = true;
                    let lag = shared.kernel.get(self.pid).and_then(|process| process.reactions.after_stdin);
                    lag.into_iter().for_each(|lag| shared.kernel.exit_after(self.pid, lag, Exit::Code(0)));
                }
            }
            Move::WriteTerminal => {
                let (pid, kernel) = (self.pid, &mut shared.kernel);
                if !self.screen.flush(|bytes| kernel.write_stdout(pid, bytes)) {
                    kernel.exit(pid, Exit::Signal(13));
                }
            }
            Move::News => drop(shared.kernel.next_news(self.pid)),
            Move::Connect => self.connect(shared),
            Move::Read => self.read(shared),
            Move::Write => {
                let Some(Connection { outbox, to, .. }) = &mut self.connection else { return };
                // A relay that does not read any more closes its side of stdout as well.
                if !outbox.flush(|bytes| to.write(&mut shared.kernel, bytes)) {
                    outbox.clear();
                }
            }
            Move::Speak => {
                let Some(Connection { conversation, outbox, .. }) = &mut self.connection else { return };
                let said = conversation.act(&mut shared.ledger, &mut shared.kernel.dice);
                put(outbox, said);
            }
            Move::Answer => {
                let Some(Connection { conversation, outbox, .. }) = &mut self.connection else { return };
                let said = conversation.answer_question(&mut shared.kernel.dice);
                put(outbox, said);
            }
        }
    }

    fn connect(&mut self, shared: &mut Shared) {
        self.relays += 1;
        let relay = shared.start(What::Relay, self.pid, self.relays);
        let (to, from) = shared.kernel.ends_of(relay);
        let is_handshake = !shared.kernel.dice.one_in(4);
        let mut conversation =
            Conversation::new(is_handshake, shared.relay_server == What::Gateway, &mut shared.ledger);
        let mut outbox = Outbox::default();
        let first = is_handshake.then(|| conversation.initialize(&mut shared.ledger, &mut shared.kernel.dice));
        put(&mut outbox, first);
        self.connection = Some(Connection { conversation, to, from, lines: Lines::default(), outbox });
    }

    fn read(&mut self, shared: &mut Shared) {
        let Some(Connection { conversation, from, lines, outbox, .. }) = &mut self.connection else { return };
        match from.read(&mut shared.kernel) {
            Read::Nothing => {}
            Read::Bytes(bytes) => {
                lines.add(&bytes);
                while let Some(line) = lines.next_line() {
                    let said: Value = serde_json::from_slice(&line)
                        .unwrap_or_else(|error| panic!("the client read no JSON ({error}): {line:?}"));
                    let reply = conversation.hear(&said, &mut shared.ledger, &mut shared.kernel.dice);
                    put(outbox, reply);
                }
            }
            Read::End => {
                let Some(Connection { to, from, .. }) = self.connection.take() else { return };
                to.close(&mut shared.kernel);
                from.close(&mut shared.kernel);
            }
        }
    }
}

fn put(outbox: &mut Outbox, said: Option<Value>) {
    if let Some(said) = said {
        outbox.put(Bytes::from(format!("{said}\n")), None);
    }
}
