//! How long clients are not served because of each kind of fault: one fault at a time, on a cluster that is whole otherwise.
//! The times are reported and not judged, since they depend on the machine.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{
    super::{
        ledger::{Answer, HUNG_AFTER},
        message::Request,
    },
    client::{Client, Seen},
    faults,
    plan::{Fault, Kind, Target},
    team::{REPLICAS, Team, lock_of},
};

/// Longer than it takes to notice a silent replica.
const LASTS_MS: u64 = 4_000;
/// Between two calls of one client through one replica.
const PAUSE: Duration = Duration::from_millis(60);

/// The times of one kind of fault.
struct Recovery {
    kind: Kind,
    is_done: bool,
    fault: Duration,
    sessions: Times,
    one: Times,
}

/// Of the clients that were served worst.
#[derive(Clone, Copy, Default)]
struct Times {
    /// The longest time in which no replica served a client.
    gap: Duration,
    /// From the end of the fault until each replica served each client.
    after: Duration,
}

impl std::fmt::Display for Recovery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Recovery { kind, is_done, fault, sessions, one } = self;
        let seconds = |time: &Duration| format!("{:.1}", time.as_secs_f64());
        let kind = format!("{kind:?}{}", if *is_done { "" } else { " (without a target)" });
        write!(
            f,
            "| {kind:18} | {:>5} | {:>5} | {:>5} | {:>5} | {:>5} |",
            seconds(fault),
            seconds(&sessions.gap),
            seconds(&sessions.after),
            seconds(&one.gap),
            seconds(&one.after)
        )
    }
}

const HEAD: &str = "recovery, in seconds: how long the fault lasted; for sessions, and for calls of the backend that runs once, the\n\
     longest time in which no replica served a client, and the time from the end of the fault until every replica did\n\
     | fault              | lasts | sess. | after |   one | after |";

/// A client, the replica that it calls through, and when it was served.
struct Path {
    client: usize,
    served: Mutex<Vec<Instant>>,
}

/// Prints a line for each kind of fault.
pub(super) fn measure(team: &Team, seen: &Seen, only: Option<&str>) {
    println!("{HEAD}");
    for target in Target::ALL.into_iter().filter(|target| only.is_none_or(|only| only == target.name())) {
        for (choice, kind) in target.faults().iter().copied().enumerate() {
            if team.is_over() {
                return;
            }
            match one_fault(team, seen, Fault { kind, choice, lasts_ms: LASTS_MS, pause_ms: 0 }) {
                Some(recovery) => println!("{recovery}"),
                None => println!("| {kind:?}: no session could be opened before it |"),
            }
            super::is_joined(team);
        }
    }
}

fn one_fault(team: &Team, seen: &Seen, fault: Fault) -> Option<Recovery> {
    // A session at each replica, and a client without one for the backend that runs once.
    let mut clients = Vec::new();
    for replica in 0..REPLICAS.len() {
        let name = format!("recovery {:?} {replica}", fault.kind);
        clients.push(stored_session(team, seen, &name, replica)?);
    }
    clients.push(Client::stateless(team, seen, format!("recovery {:?}", fault.kind)));
    let one = clients.len() - 1;
    let paths: Vec<(Path, usize)> = (0..clients.len())
        .flat_map(|client| (0..REPLICAS.len()).map(move |replica| (client, replica)))
        .map(|(client, replica)| (Path { client, served: Mutex::default() }, replica))
        .collect();
    let is_over = AtomicBool::new(false);
    let (mut begun, mut ended, mut is_done) = (Instant::now(), Instant::now(), false);
    thread::scope(|scope| {
        for (path, replica) in &paths {
            let (mut client, is_over) = (clients[path.client].again(), &is_over);
            let backend = if path.client == one { "one" } else { "own" };
            scope.spawn(move || {
                let request = Request::tool(format!("{backend}__echo"), json!({}));
                while !is_over.load(Ordering::Relaxed) && !team.is_over() {
                    let life = team.life(*replica).filter(|life| !life.is_ended.load(Ordering::SeqCst));
                    let call = life.and_then(|life| client.call(&life, backend, &request));
                    if call.and_then(|call| team.ledger.last_answer(call)) == Some(Answer::Done) {
                        lock_of(&path.served).push(Instant::now());
                    }
                    thread::sleep(PAUSE);
                }
            });
        }
        let served_since = |since: Instant| {
            paths.iter().all(|(path, _)| lock_of(&path.served).last().is_some_and(|last| since < *last))
        };
        team.until("the clients to be served before a fault", || served_since(begun).then_some(()));
        begun = Instant::now();
        team.note(&format!("{fault:?}, alone"));
        is_done = faults::apply(team, &fault);
        ended = Instant::now();
        team.note(&format!("{:?} is over", fault.kind));
        if team.until("the clients to be served after a fault", || served_since(ended).then_some(())).is_none() {
            let what =
                format!("{:?}: not every replica serves every client {} s later", fault.kind, HUNG_AFTER.as_secs());
            team.ledger.breach(what);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let times = |is_one: bool| {
        let mut times = Times::default();
        for client in (0..clients.len()).filter(|client| (*client == one) == is_one) {
            let own = || paths.iter().filter(|(path, _)| path.client == client);
            let mut served: Vec<Instant> = own().flat_map(|(path, _)| lock_of(&path.served).clone()).collect();
            served.sort();
            times.gap = times.gap.max(longest_gap(&served, begun));
            for (path, _) in own() {
                let first = lock_of(&path.served).iter().copied().find(|at| ended < *at);
                times.after = times.after.max(first.map_or(HUNG_AFTER, |first| first - ended));
            }
        }
        times
    };
    Some(Recovery { kind: fault.kind, is_done, fault: ended - begun, sessions: times(false), one: times(true) })
}

/// A session that every replica serves. After a fault NATS may elect leaders for some seconds; a session whose record is not
/// stored within one second is local to its replica, and the others do not know it.
fn stored_session<'a>(team: &'a Team, seen: &'a Seen, name: &str, replica: usize) -> Option<Client<'a>> {
    let local_sessions = || team.state(replica)?["cluster"]["sessions_local"].as_u64();
    team.until("a session whose record is stored", || {
        let before = local_sessions()?;
        let client = Client::open(team, seen, name.to_owned(), &team.life(replica)?)?;
        (local_sessions()? <= before).then_some(client)
    })
}

/// Between two calls that were served, the later one of them after `since`.
fn longest_gap(served: &[Instant], since: Instant) -> Duration {
    let gaps = served.windows(2).filter(|pair| since < pair[1]).map(|pair| pair[1] - pair[0].max(since));
    gaps.max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_gap_after_a_moment_is_found() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let served = [at(0), at(900), at(1_000), at(1_050), at(1_600), at(1_700)];
        assert_eq!(longest_gap(&served, at(1_020)), Duration::from_millis(550));
        // Only what is after the moment counts.
        assert_eq!(longest_gap(&served, at(1_500)), Duration::from_millis(100));
        assert_eq!(longest_gap(&[], start), Duration::ZERO);
    }
}
