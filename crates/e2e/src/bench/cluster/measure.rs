//! The cost of a call: to one gateway, to a replica, to another replica's backend, and of a session of another replica.

use std::{
    io,
    time::{Duration, Instant},
};

use super::{
    Size,
    table::{Metric, Report},
    team::{Gateway, Stage, Team},
};
use crate::bench::{
    gateway::{
        client::Session,
        measure::{measure_load, measure_small},
    },
    table::median,
};

const SESSIONS: usize = 32;
/// The ways are measured in turns of so many calls, so that a disturbance affects all of them.
const TURN: usize = 200;
/// No single measurement takes this long.
const MEASURE_MAX: Duration = Duration::from_secs(180);

/// The ways of a call, in the order of the samples.
const ALONE: usize = 0;
const LOCAL: usize = 1;
const REMOTE: usize = 2;
const AT_OWNER: usize = 3;
const FORWARDED: usize = 4;
const WAYS: usize = 5;

/// Sessions for each way. All but those at the owner enter at the same replica.
fn open(team: &Team, alone: &Gateway, count: usize) -> io::Result<[Vec<Session>; WAYS]> {
    let (owner, [entry, home]) = team.owner("one")?;
    let mut forwarded = home.open_many("each__echo", count)?;
    for session in &mut forwarded {
        session.reconnect(entry.address())?;
    }
    Ok([
        alone.open_many("each__echo", count)?,
        entry.open_many("each__echo", count)?,
        entry.open_many("one__echo", count)?,
        owner.open_many("one__echo", count)?,
        forwarded,
    ])
}

fn rotated(round: usize) -> impl Iterator<Item = usize> {
    (0..WAYS).map(move |way| (way + round) % WAYS)
}

pub(super) fn small(stage: &Stage, size: &Size, report: &mut Report) -> io::Result<()> {
    let team = Team::start(stage)?;
    let alone = team.start_alone(stage)?;
    for round in 0..size.rounds {
        eprintln!("round {} of {}", round + 1, size.rounds);
        let mut sessions = open(&team, &alone, 1)?;
        for session in &mut sessions {
            measure_small(&mut session[0], TURN, MEASURE_MAX)?;
        }
        let mut times: [Vec<Duration>; WAYS] = Default::default();
        for turn in 0..size.small_calls.div_ceil(TURN) {
            for way in rotated(round + turn) {
                times[way].extend(measure_small(&mut sessions[way][0], TURN, MEASURE_MAX)?);
            }
        }
        let p50 = times.map(|times| {
            let times = times.into_iter().map(|time| time.as_secs_f64() * 1e6).collect();
            median(times).unwrap_or(f64::NAN)
        });
        report.pair(Metric::Local, p50[LOCAL], p50[ALONE]);
        for (metric, way) in [(Metric::Remote, REMOTE), (Metric::AtOwner, AT_OWNER), (Metric::Forwarded, FORWARDED)] {
            report.pair(metric, p50[way], p50[LOCAL]);
        }
    }
    Ok(())
}

pub(super) fn load(stage: &Stage, size: &Size, report: &mut Report) -> io::Result<()> {
    let team = Team::start(stage)?;
    let alone = team.start_alone(stage)?;
    let mut sessions = open(&team, &alone, SESSIONS)?;
    for round in 0..size.rounds {
        eprintln!("round {} of {}", round + 1, size.rounds);
        let mut rates = [0.0; WAYS];
        for way in rotated(round).filter(|way| *way != AT_OWNER) {
            // Not measured: the first calls after a pause.
            measure_load(&mut sessions[way], TURN, MEASURE_MAX)?;
            let start = Instant::now();
            let load = measure_load(&mut sessions[way], size.load_calls, MEASURE_MAX)?;
            if load.failed > 0 {
                return Err(io::Error::other(format!("{} of {} calls failed", load.failed, load.calls)));
            }
            rates[way] = load.calls as f64 / start.elapsed().as_secs_f64();
        }
        report.pair(Metric::LoadLocal, rates[LOCAL], rates[ALONE]);
        report.pair(Metric::LoadRemote, rates[REMOTE], rates[LOCAL]);
        report.pair(Metric::LoadForwarded, rates[FORWARDED], rates[LOCAL]);
    }
    Ok(())
}
