//! How soon clients are served again after a replica is killed, how soon a switch applies, and how often each call ran.

use std::{
    io,
    sync::OnceLock,
    thread,
    thread::ScopedJoinHandle,
    time::{Duration, Instant},
};

use super::{
    Size,
    table::{Metric, Report},
    team::{Gateway, Stage, Team, until},
};
use crate::bench::gateway::{client::Session, measure::milliseconds};

/// Callers that wait for an answer when the owner is killed.
const CALLERS: usize = 16;
/// Clients that call without a pause while it is killed.
const BUSY: usize = 4;
/// Sessions of each kind when a replica is killed.
const SESSIONS: usize = 8;
/// A client that is not served by then counts as lost. A lease ends after 10 s.
const SERVED_MAX: Duration = Duration::from_secs(30);
/// The pause between calls that fail at once.
const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// Calls of each busy client before a replica is killed.
const CALLS_BEFORE: usize = 20;

/// The time at which the replica was killed, once it is.
type KilledAt = OnceLock<Instant>;

/// A client that calls a tool of the ledger without a pause.
struct Busy<'a> {
    session: Session,
    tool: &'static str,
    team: &'a Team,
    /// Where the client goes when its connection breaks.
    next: &'a Gateway,
}

impl<'a> Busy<'a> {
    /// A session that begins at its home; its client sends calls to `entry`, and some of them have succeeded.
    fn open(
        team: &'a Team,
        tool: &'static str,
        home: &Gateway,
        entry: &Gateway,
        next: &'a Gateway,
    ) -> io::Result<Busy<'a>> {
        let mut session = home.open(tool)?;
        session.reconnect(entry.address())?;
        let mut client = Busy { session, tool, team, next };
        for _ in 0..CALLS_BEFORE {
            if !client.call()? {
                return Err(io::Error::other("a call failed before any fault"));
            }
        }
        Ok(client)
    }

    fn call(&mut self) -> io::Result<bool> {
        let call = self.team.next_call();
        self.session.call_tool(self.tool, &format!(r#"{{"call":{call},"text":"x"}}"#))
    }

    /// From the kill to the result of a call that was sent after it; `None` if there is none.
    fn serve(mut self, killed: &KilledAt) -> Option<Duration> {
        loop {
            let sent = Instant::now();
            let answer = self.call();
            let killed = killed.get().copied();
            match answer {
                Ok(true) if killed.is_some_and(|killed| killed <= sent) => return Some(killed?.elapsed()),
                Ok(true) => {}
                Ok(false) => thread::sleep(RETRY_PAUSE),
                Err(_) => {
                    // A refused connection is tried again.
                    if self.session.reconnect(self.next.address()).is_err() {
                        thread::sleep(RETRY_PAUSE);
                    }
                }
            }
            if killed.is_some_and(|killed| SERVED_MAX < killed.elapsed()) {
                return None;
            }
        }
    }
}

/// The longest time of these clients; infinite if one of them was not served.
fn longest(clients: Vec<ScopedJoinHandle<'_, Option<Duration>>>) -> f64 {
    let times = clients.into_iter().map(|client| client.join().ok().flatten());
    times.map(|time| time.map_or(f64::INFINITY, milliseconds)).fold(0.0, f64::max)
}

fn count(team: &Team, report: &mut Report) {
    let executed = team.executed();
    report.count(Metric::Counted, executed.len());
    report.count(Metric::Twice, executed.values().filter(|times| **times > 1).count());
}

/// The owner of a backend is killed while calls are open on the two other replicas.
pub(super) fn owner(stage: &Stage, size: &Size, report: &mut Report) -> io::Result<()> {
    for round in 0..size.kills {
        eprintln!("kill {} of {}", round + 1, size.kills);
        let team = Team::start(stage)?;
        let (owner, others) = team.owner("ledger")?;
        let mut callers = Vec::new();
        for at in 0..CALLERS {
            callers.push((others[at % 2].open("ledger__sleep")?, team.next_call()));
        }
        let open: Vec<u64> = callers.iter().map(|(_, call)| *call).collect();
        let mut busy = Vec::new();
        for at in 0..BUSY {
            let replica = others[at % 2];
            busy.push(Busy::open(&team, "ledger__echo", replica, replica, replica)?);
        }
        let killed = &KilledAt::new();
        let (answered, replaced) = thread::scope(|scope| {
            let wait = |(mut session, call): (Session, u64)| {
                scope.spawn(move || {
                    let is_result = session.call_tool("ledger__sleep", &format!(r#"{{"call":{call},"ms":600000}}"#));
                    // Its only right answer is an error.
                    (is_result.ok() == Some(false)).then(Instant::now)
                })
            };
            let callers: Vec<_> = callers.into_iter().map(wait).collect();
            let are_open = until("the calls", || {
                let executed = team.executed();
                open.iter().all(|call| executed.contains_key(call)).then_some(())
            });
            let serve = |client| scope.spawn(move || Busy::serve(client, killed));
            let busy: Vec<_> = busy.into_iter().map(serve).collect();
            let now = *killed.get_or_init(Instant::now);
            owner.kill();
            let answers: Vec<Option<Instant>> =
                callers.into_iter().map(|caller| caller.join().ok().flatten()).collect();
            let since = |answer: Option<Instant>| {
                answer.map_or(f64::INFINITY, |answer| milliseconds(answer.saturating_duration_since(now)))
            };
            let answered = answers.into_iter().map(since).fold(0.0, f64::max);
            (are_open.map(|()| answered), longest(busy))
        });
        report.sample(Metric::OwnerAnswered, answered?);
        report.sample(Metric::OwnerReplaced, replaced);
        count(&team, report);
    }
    Ok(())
}

/// One of three replicas is killed: the home of some sessions, and the one that clients use for others.
pub(super) fn sessions(stage: &Stage, size: &Size, report: &mut Report) -> io::Result<()> {
    for round in 0..size.kills {
        eprintln!("kill {} of {}", round + 1, size.kills);
        let team = Team::start(stage)?;
        let [left, victim, home] = team.replicas() else { return Err(io::Error::other("not three replicas")) };
        let (mut entered, mut at_home) = (Vec::new(), Vec::new());
        for _ in 0..SESSIONS {
            entered.push(Busy::open(&team, "book__echo", home, victim, left)?);
            at_home.push(Busy::open(&team, "book__echo", victim, left, left)?);
            at_home.push(Busy::open(&team, "book__echo", victim, victim, left)?);
        }
        let killed = &KilledAt::new();
        let (entry, at_home) = thread::scope(|scope| {
            let serve = |client| scope.spawn(move || Busy::serve(client, killed));
            let entered: Vec<_> = entered.into_iter().map(serve).collect();
            let at_home: Vec<_> = at_home.into_iter().map(serve).collect();
            killed.get_or_init(Instant::now);
            victim.kill();
            (longest(entered), longest(at_home))
        });
        report.sample(Metric::EntryKilled, entry);
        report.sample(Metric::HomeKilled, at_home);
        count(&team, report);
    }
    Ok(())
}

/// From the start of the command to the first call that each replica answers accordingly.
pub(super) fn switch(stage: &Stage, size: &Size, report: &mut Report) -> io::Result<()> {
    const TOOL: &str = "each__echo";
    let team = Team::start(stage)?;
    let mut sessions = Vec::new();
    for replica in team.replicas() {
        sessions.push(replica.open(TOOL)?);
    }
    for round in 0..size.switches {
        for (option, is_on) in [("--off", false), ("--on", true)] {
            let start = Instant::now();
            let (told, longest) = thread::scope(|scope| {
                let watch = |session| scope.spawn(move || applied(session, is_on, start));
                let watches: Vec<_> = sessions.iter_mut().map(watch).collect();
                let told = team.replicas()[round % team.replicas().len()].outlast(&["switch", option, TOOL]);
                (told, longest(watches))
            });
            told?;
            report.sample(Metric::Switched, longest);
        }
    }
    Ok(())
}

fn applied(session: &mut Session, is_on: bool, start: Instant) -> Option<Duration> {
    while start.elapsed() < SERVED_MAX {
        if session.call().ok()? == is_on {
            return Some(start.elapsed());
        }
        thread::sleep(RETRY_PAUSE);
    }
    None
}
