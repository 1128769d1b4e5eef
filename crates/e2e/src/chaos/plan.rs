//! The next fault for each part of the world. It is a pure function of the seed: the state of the processes has no
//! influence on it.

use super::random::Random;

/// A part of the world with its own faults. Parts run at the same time; the faults of one part come one after the
/// other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// An `outlast mcp` that runs for the whole run.
    Relay,
    /// An `outlast mcp` that is killed and loses its client.
    ShortRelay,
    /// An `outlast gateway --listen` that runs for the whole run.
    Gateway,
    /// An `outlast gateway --stdio` that is killed and loses its client.
    ShortGateway,
    /// `outlast run`.
    Session,
    /// The disk and the clock, which all parts share.
    Machine,
}

impl Part {
    pub(super) const ALL: [Part; 6] =
        [Part::Relay, Part::ShortRelay, Part::Gateway, Part::ShortGateway, Part::Session, Part::Machine];

    pub(super) fn name(self) -> &'static str {
        match self {
            Part::Relay => "relay",
            Part::ShortRelay => "short-relay",
            Part::Gateway => "gateway",
            Part::ShortGateway => "short-gateway",
            Part::Session => "session",
            Part::Machine => "machine",
        }
    }

    fn faults(self) -> Vec<Kind> {
        use Kind::*;
        /// Faults of every outlast with MCP servers that must survive the whole run.
        const LASTING: &[Kind] = &[
            KillServer,
            StopServer,
            Exit42,
            Crash,
            Garbage,
            AnswerTwice,
            Hang,
            SlowClient,
            Stray,
            KillMonitor,
            StopMonitor,
            KillKeeper,
            StopKeeper,
            StopOutlast,
            Restart,
        ];
        match self {
            Part::Relay => [LASTING, &[EditSource]].concat(),
            Part::ShortRelay => vec![KillOutlast, Vanish, KillServer, StopOutlast, KillKeeper, Crash],
            Part::Gateway => [LASTING, &[EditConfig, Vanish, Descriptors]].concat(),
            Part::ShortGateway => vec![KillOutlast, Vanish, KillServer, StopOutlast, KillMonitor, Exit42],
            Part::Session => {
                vec![KillServer, StopServer, Halt, Viewers, KillMonitor, KillKeeper, KillOutlast, StopOutlast]
            }
            Part::Machine => vec![FullDisk, ClockForward, ClockBack],
        }
    }
}

/// In `outlast run` the server is the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// SIGKILL.
    KillServer,
    /// SIGSTOP, and SIGCONT after a while.
    StopServer,
    /// The server exits with code 42 in a call.
    Exit42,
    /// The server exits with another code in a call.
    Crash,
    /// The server writes lines that are not answers.
    Garbage,
    /// The server answers a call twice.
    AnswerTwice,
    /// The server stops reading and does not answer.
    Hang,
    /// The client does not read for a while, or reads slowly.
    SlowClient,
    /// The server starts a process in a new session, without our environment, and is killed.
    Stray,
    /// A watched file changes; some versions of it make the server fail at its start.
    EditSource,
    /// The configuration file is replaced: by a valid, a broken and again a valid one.
    EditConfig,
    KillMonitor,
    StopMonitor,
    KillKeeper,
    StopKeeper,
    /// SIGSTOP of outlast itself, longer than its time limits, and SIGCONT.
    StopOutlast,
    KillOutlast,
    /// The client closes its pipes, or its connection, with open calls.
    Vanish,
    /// outlast has no descriptor left, and many clients connect.
    Descriptors,
    /// `outlast restart`.
    Restart,
    /// The agent is killed until the session is halted, and then resumed.
    Halt,
    /// Terminals attach to the session and are killed.
    Viewers,
    /// The disk of the state directory is full.
    FullDisk,
    ClockForward,
    ClockBack,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub kind: Kind,
    /// Selects one of several: a backend, a version of a file, a method.
    pub choice: u64,
    /// The duration of a lasting fault.
    pub lasts_ms: u64,
    /// The pause before the next fault.
    pub pause_ms: u64,
}

/// All faults of one part, without end. Each kind comes once in each round, in random order.
pub(super) struct Plan {
    part: Part,
    random: Random,
    round: Vec<Kind>,
}

impl Plan {
    pub(super) fn new(seed: u64, part: Part) -> Plan {
        Plan { part, random: Random::new(seed, part.name()), round: Vec::new() }
    }

    /// Kinds of fault in one round.
    pub(super) fn kinds(part: Part) -> usize {
        part.faults().len()
    }
}

impl Iterator for Plan {
    type Item = Fault;

    fn next(&mut self) -> Option<Fault> {
        if self.round.is_empty() {
            self.round = self.part.faults();
            self.random.shuffle(&mut self.round);
        }
        let kind = self.round.pop()?;
        Some(Fault {
            kind,
            choice: self.random.between(0, 1 << 16),
            lasts_ms: self.random.between(100, 1500),
            pause_ms: self.random.between(100, 700),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_seed_decides_every_fault() {
        for part in Part::ALL {
            let faults = |seed| Plan::new(seed, part).take(100).collect::<Vec<_>>();
            assert_eq!(faults(7), faults(7));
            assert_ne!(faults(7), faults(8));
        }
    }

    #[test]
    fn each_round_has_every_fault_once() {
        for (seed, part) in (0..20).flat_map(|seed| Part::ALL.map(|part| (seed, part))) {
            let round: BTreeSet<Kind> = Plan::new(seed, part).take(Plan::kinds(part)).map(|fault| fault.kind).collect();
            assert_eq!(round.len(), Plan::kinds(part), "{part:?}");
        }
    }
}
