//! Carries out the faults of a plan on the processes of a cluster.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::{
    super::machine::Disk,
    nats,
    network::{SERVERS, Sides},
    plan::{Fault, Kind},
    proxy::Mode,
    team::{REPLICAS, Team, lock_of},
};

/// How long the target may take to appear: the process of `one` may be in a restart.
const TARGET_WAIT: Duration = Duration::from_secs(2);
/// The longest time for which a replica that was ended stays away.
const AWAY_MAX: Duration = Duration::from_secs(4);

/// False if the target did not exist.
pub(super) fn apply(team: &Team, fault: &Fault) -> bool {
    let lasts = Duration::from_millis(fault.lasts_ms);
    let replica = fault.choice % REPLICAS.len();
    match fault.kind {
        Kind::KillReplica => end(team, replica, Signal::SIGKILL, lasts),
        Kind::EndReplica => end(team, replica, Signal::SIGTERM, lasts),
        Kind::KillOwner => owner(team).is_some_and(|owner| end(team, owner, Signal::SIGKILL, lasts)),
        Kind::StopReplica => stop(team, replica, lasts),
        Kind::StopOwner => owner(team).is_some_and(|owner| stop(team, owner, lasts)),
        Kind::KillOne => within(|| team.one()).is_some_and(|(_, process, holder)| {
            let target = if fault.choice.is_multiple_of(2) { process } else { holder };
            target.signal(Signal::SIGKILL)
        }),
        Kind::KillLocal => {
            let locals = team.locals(replica);
            locals.get(fault.choice % locals.len().max(1)).is_some_and(|local| local.signal(Signal::SIGKILL))
        }
        Kind::KillLeader | Kind::KillFollower | Kind::KillAll => kill_nats(team, fault, lasts),
        Kind::StopMinority => stop_nats(team, &[fault.choice % 3], lasts),
        Kind::StopMajority => stop_nats(team, &[fault.choice % 3, (fault.choice + 1) % 3], lasts),
        Kind::CutReplica => disconnect(team, replica, Mode::Cut, lasts),
        Kind::SilenceReplica => disconnect(team, replica, Mode::Silent, lasts),
        Kind::CutOwner => owner(team).is_some_and(|owner| disconnect(team, owner, Mode::Cut, lasts)),
        Kind::SilenceOwner => owner(team).is_some_and(|owner| disconnect(team, owner, Mode::Silent, lasts)),
        Kind::PartitionMinority => separate(team, &[(fault.choice % 3, 1), (SERVERS + replica, 1)], lasts),
        Kind::PartitionMajority => {
            let others = [SERVERS + replica, SERVERS + (replica + 1) % 3].map(|node| (node, 1));
            separate(team, &[&[(fault.choice % 3, 1)], &others[..]].concat(), lasts)
        }
        Kind::PartitionAll => {
            let side = |n: usize| [(n, n + 1), (SERVERS + (n + fault.choice) % 3, n + 1)];
            separate(team, &[side(0), side(1), side(2)].concat(), lasts)
        }
        Kind::FillState => fill_state(team, replica, lasts),
        Kind::FillStore => fill_store(team, fault.choice % 3, lasts),
    }
}

/// Ends every lasting fault.
pub(super) fn restore(team: &Team) {
    for server in lock_of(&team.nats).iter() {
        server.signal(Signal::SIGCONT);
    }
    team.separate(&Sides::new());
    for replica in 0..REPLICAS.len() {
        team.connect(replica, Mode::Open);
        if let Some(process) = team.process(replica) {
            process.signal(Signal::SIGCONT);
        }
    }
}

fn within<T>(mut find: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + TARGET_WAIT;
    loop {
        let found = find();
        if found.is_some() || deadline < Instant::now() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn owner(team: &Team) -> Option<usize> {
    within(|| team.one()).map(|(replica, _, _)| replica)
}

fn end(team: &Team, replica: usize, signal: Signal, lasts: Duration) -> bool {
    let name = REPLICAS[replica];
    let code = team.end(replica, signal);
    if signal == Signal::SIGTERM && code != Some(0) {
        team.ledger.breach(format!("replica {name} ended with {code:?} instead of 0"));
    }
    team.pause(lasts.min(AWAY_MAX));
    if let Err(problem) = team.start(replica) {
        team.ledger.breach(problem);
        return false;
    }
    true
}

fn stop(team: &Team, replica: usize, lasts: Duration) -> bool {
    let Some(process) = team.process(replica) else { return false };
    let is_done = process.signal(Signal::SIGSTOP);
    team.pause(lasts);
    process.signal(Signal::SIGCONT);
    is_done
}

fn disconnect(team: &Team, replica: usize, mode: Mode, lasts: Duration) -> bool {
    team.connect(replica, mode);
    team.pause(lasts);
    team.connect(replica, Mode::Open);
    true
}

fn kill_nats(team: &Team, fault: &Fault, lasts: Duration) -> bool {
    let mut servers = lock_of(&team.nats);
    let Some(leader) = within(|| nats::leader(&servers)) else { return false };
    let targets = match fault.kind {
        Kind::KillLeader => vec![leader],
        Kind::KillFollower => vec![(leader + 1 + fault.choice % 2) % 3],
        _ => vec![0, 1, 2],
    };
    for target in &targets {
        servers[*target].kill();
    }
    team.pause(lasts);
    for target in targets {
        if let Err(problem) = servers[target].start() {
            team.ledger.breach(problem);
        }
    }
    true
}

fn stop_nats(team: &Team, targets: &[usize], lasts: Duration) -> bool {
    let servers = lock_of(&team.nats);
    let is_done = targets.iter().all(|target| servers[*target].signal(Signal::SIGSTOP));
    team.pause(lasts);
    for target in targets {
        servers[*target].signal(Signal::SIGCONT);
    }
    is_done
}

fn separate(team: &Team, sides: &[(usize, usize)], lasts: Duration) -> bool {
    team.separate(&sides.iter().copied().collect());
    team.pause(lasts);
    team.separate(&Sides::new());
    true
}

fn fill_state(team: &Team, replica: usize, lasts: Duration) -> bool {
    let disk = &team.disks[replica];
    let running: Vec<_> = team.process(replica).into_iter().collect();
    let filled = disk.fill(&running);
    team.pause(lasts);
    // It may have been started again meanwhile.
    let running: Vec<_> = running.into_iter().chain(team.process(replica)).collect();
    if let Err(problem) = filled.clone().and(disk.free(&running)) {
        team.ledger.breach(format!("the disk of replica {}: {problem}", REPLICAS[replica]));
    }
    filled.is_ok()
}

/// A NATS server without room turns JetStream off, which its own service manager has to notice: it is started again once there
/// is room. The other servers continue meanwhile.
fn fill_store(team: &Team, server: usize, lasts: Duration) -> bool {
    // No other fault starts a server meanwhile.
    let mut servers = lock_of(&team.nats);
    // A limit of file sizes would end it by a signal.
    if !matches!(servers[server].disk, Disk::Small { .. }) || servers[server].disk.fill(&[]).is_err() {
        return false;
    }
    team.pause(lasts);
    if let Err(problem) = servers[server].disk.free(&[]) {
        team.ledger.breach(format!("the disk of NATS server {server}: {problem}"));
    }
    if !servers[server].has_jetstream() {
        team.note(&format!("NATS server {server} has turned JetStream off"));
        servers[server].kill();
        if let Err(problem) = servers[server].start() {
            team.ledger.breach(problem);
        }
    }
    true
}
