//! The next fault of a cluster. It is a pure function of the seed: the state of the processes has no influence on it.

use super::super::random::Random;

/// Faults of different kinds of targets come at the same time; those of one kind come one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Target {
    /// The gateways, and the processes below them.
    Replicas,
    /// The NATS servers.
    Nats,
    /// The connections of replicas to NATS, and of NATS servers to each other.
    Network,
    /// The disks of replicas and of NATS servers.
    Disks,
}

impl Target {
    pub(super) const ALL: [Target; 4] = [Target::Replicas, Target::Nats, Target::Network, Target::Disks];

    pub(super) fn name(self) -> &'static str {
        match self {
            Target::Replicas => "replicas",
            Target::Nats => "nats",
            Target::Network => "network",
            Target::Disks => "disks",
        }
    }

    pub(super) fn faults(self) -> &'static [Kind] {
        use Kind::*;
        match self {
            Target::Replicas => &[KillReplica, KillOwner, StopReplica, StopOwner, KillOne, KillLocal, EndReplica],
            Target::Nats => &[KillLeader, KillFollower, KillAll, StopMinority, StopMajority],
            Target::Network => &[
                CutReplica,
                CutOwner,
                SilenceReplica,
                SilenceOwner,
                PartitionMinority,
                PartitionMajority,
                PartitionAll,
            ],
            Target::Disks => &[FillState, FillStore],
        }
    }

    /// The longest time of a lasting fault. A stopped owner must be able to miss the end of its lease.
    fn lasts_max_ms(self) -> u64 {
        match self {
            Target::Replicas => 15_000,
            Target::Nats => 6_000,
            Target::Network => 13_000,
            Target::Disks => 5_000,
        }
    }

    /// The longest pause after a fault. Without NATS there is no owner, and other faults have less to hit.
    fn pause_max_ms(self) -> u64 {
        match self {
            Target::Replicas => 2_500,
            Target::Nats => 14_000,
            Target::Network => 12_000,
            Target::Disks => 16_000,
        }
    }
}

/// The owner is the replica that runs the process of the backend `one`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// SIGKILL; the replica is started again.
    KillReplica,
    KillOwner,
    /// SIGSTOP, and SIGCONT after a while.
    StopReplica,
    StopOwner,
    /// SIGKILL of the process of `one`, or of the process that holds its lock.
    KillOne,
    /// SIGKILL of a process of a backend that every replica has.
    KillLocal,
    /// SIGTERM, as an operator does; the replica is started again.
    EndReplica,
    /// SIGKILL of the NATS server that leads the bucket of the leases; it is started again with its data.
    KillLeader,
    /// SIGKILL of another NATS server.
    KillFollower,
    /// SIGKILL of all NATS servers.
    KillAll,
    /// SIGSTOP of one NATS server.
    StopMinority,
    /// SIGSTOP of two.
    StopMajority,
    /// Connections of a replica to NATS are closed and refused.
    CutReplica,
    CutOwner,
    /// Connections of a replica to NATS carry nothing, and stay open.
    SilenceReplica,
    SilenceOwner,
    /// One NATS server and one replica are separated from all others: this side has no quorum.
    PartitionMinority,
    /// One NATS server and two replicas are separated from all others: most replicas have no quorum.
    PartitionMajority,
    /// Each NATS server is separated from the others, with one replica each: no side has a quorum.
    PartitionAll,
    /// No byte can be added to the state directory of a replica.
    FillState,
    /// No byte can be added to the store of a NATS server. It turns JetStream off then, until it is started again.
    FillStore,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub kind: Kind,
    /// Selects one of several targets.
    pub choice: usize,
    pub lasts_ms: u64,
    /// The pause before the next fault.
    pub pause_ms: u64,
}

/// All faults of one kind of targets, without end. Each kind of fault comes once in each round, in random order.
pub(super) struct Plan {
    target: Target,
    random: Random,
    round: Vec<Kind>,
}

impl Plan {
    pub(super) fn new(seed: u64, target: Target) -> Plan {
        Plan { target, random: Random::new(seed, target.name()), round: Vec::new() }
    }

    /// Kinds of fault in one round.
    pub(super) fn kinds(target: Target) -> usize {
        target.faults().len()
    }
}

impl Iterator for Plan {
    type Item = Fault;

    fn next(&mut self) -> Option<Fault> {
        if self.round.is_empty() {
            self.round = self.target.faults().to_vec();
            self.random.shuffle(&mut self.round);
        }
        let kind = self.round.pop()?;
        // Many of them are short, so that a short run has many.
        let is_long = self.random.between(0, 2) == 1;
        let lasts_max = if is_long { self.target.lasts_max_ms() } else { 2_500 };
        Some(Fault {
            kind,
            choice: self.random.between(0, 1 << 16) as usize,
            lasts_ms: self.random.between(1_000, lasts_max),
            pause_ms: self.random.between(500, self.target.pause_max_ms()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_seed_decides_every_fault() {
        for target in Target::ALL {
            let faults = |seed| Plan::new(seed, target).take(100).collect::<Vec<_>>();
            assert_eq!(faults(7), faults(7));
            assert_ne!(faults(7), faults(8));
        }
    }

    #[test]
    fn each_round_has_every_fault_once_and_some_outlast_a_lease() {
        for target in Target::ALL {
            let faults: Vec<Fault> = Plan::new(3, target).take(40 * Plan::kinds(target)).collect();
            for round in faults.chunks(Plan::kinds(target)) {
                let kinds: BTreeSet<Kind> = round.iter().map(|fault| fault.kind).collect();
                assert_eq!(kinds.len(), Plan::kinds(target), "{target:?}");
            }
            let is_long = faults.iter().any(|fault| fault.lasts_ms > 11_000);
            assert_eq!(is_long, matches!(target, Target::Replicas | Target::Network), "{target:?}");
        }
    }
}
