//! The measurements: each is made for every subject in turn.

use std::{
    collections::BTreeMap,
    io, thread,
    time::{Duration, Instant},
};

use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    client::{self, Session},
    hostile, lists,
    subject::{Running, Stage, Subject},
    table::{Metric, Report},
};
use crate::bench::{
    measure::{READY_FOR, RECOVERY_MAX, RETRY_PAUSE, Spent, WARM_UP_CALLS, bare_start, percentiles},
    session as pipes, subject as relay,
    tree::Process,
};

const SESSIONS: usize = 32;
/// What backends list, and how many of them.
const LISTS: [(Metric, lists::Kind, usize); 6] = [
    (Metric::LongestTurnList, lists::Kind::Names, 1),
    (Metric::LongestTurnLists, lists::Kind::Names, 8),
    (Metric::LongestTurnCollisions, lists::Kind::Colliding, 8),
    (Metric::LongestTurnLarge, lists::Kind::Large, 8),
    (Metric::LongestTurnDeep, lists::Kind::Deep, 8),
    (Metric::LongestTurnNumbers, lists::Kind::Numbers, 8),
];
/// Sessions that are subscribed to a resource. An address may keep 256 idle connections.
const SUBSCRIBED: usize = 200;
/// How often the server reports all its changes.
const FLOODS: usize = 3;
/// How long a client calls while these are read.
const LISTS_MAX: Duration = Duration::from_secs(5);
const BACKENDS: usize = 10;
/// Sessions that one gateway keeps across its restart.
const MANY: usize = 10_000;
/// Long enough for start-up work to finish, before "idle" is measured.
const SETTLE: Duration = Duration::from_secs(1);
/// Load before the server is killed, and after.
const AROUND_KILL: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Phase {
    Small,
    Load,
    Rss,
    Crash,
    Loop,
    Sessions,
}

impl Phase {
    pub(crate) const ALL: [Phase; 6] =
        [Phase::Small, Phase::Load, Phase::Rss, Phase::Crash, Phase::Loop, Phase::Sessions];

    pub(crate) fn named(name: &str) -> Option<Phase> {
        Phase::ALL.into_iter().find(|phase| phase.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Phase::Small => "small",
            Phase::Load => "load",
            Phase::Rss => "rss",
            Phase::Crash => "crash",
            Phase::Loop => "loop",
            Phase::Sessions => "sessions",
        }
    }
}

struct Size {
    rounds: usize,
    small_calls: usize,
    load_calls: usize,
    crashes: usize,
    /// The longest time for one measurement of a rival; its results by then are its sample.
    rival_max: Duration,
}

const FULL: Size =
    Size { rounds: 5, small_calls: 10_000, load_calls: 40_000, crashes: 3, rival_max: Duration::from_secs(4) };
const QUICK: Size =
    Size { rounds: 3, small_calls: 3_000, load_calls: 15_000, crashes: 1, rival_max: Duration::from_secs(2) };
/// No single measurement of a working subject takes this long.
const OURS_MAX: Duration = Duration::from_secs(180);

pub(super) struct Bench<'a> {
    stage: &'a Stage,
    size: Size,
    /// The subjects that are still measured; a subject that fails is removed with a note.
    subjects: Vec<Subject>,
    report: Report,
}

impl<'a> Bench<'a> {
    pub(super) fn new(stage: &'a Stage, is_quick: bool) -> Bench<'a> {
        let size = if is_quick { QUICK } else { FULL };
        let mut report = Report::new(size.rounds);
        let mut subjects = Vec::new();
        for subject in Subject::ALL {
            match stage.absence(subject) {
                None => subjects.push(subject),
                Some(why) => report.note(format!("{} is not measured: {why}", subject.name())),
            }
        }
        Bench { stage, size, subjects, report }
    }

    pub(super) fn run(mut self, phases: &[Phase]) -> Report {
        let calls: Vec<Phase> =
            [Phase::Small, Phase::Load].into_iter().filter(|phase| phases.contains(phase)).collect();
        if !calls.is_empty() {
            self.measure_calls(&calls);
        }
        if phases.contains(&Phase::Rss) {
            self.measure_memory();
        }
        if phases.contains(&Phase::Crash) {
            self.measure_crashes();
        }
        if phases.contains(&Phase::Loop) {
            self.measure_loop();
        }
        if phases.contains(&Phase::Sessions)
            && let Err(problem) = self.measure_sessions()
        {
            self.drop_out(Subject::Outlast, Phase::Sessions, &problem);
        }
        self.report
    }

    fn drop_out(&mut self, subject: Subject, phase: Phase, problem: &io::Error) {
        self.report.note(format!("{} dropped out at `{}`: it {problem}", subject.name(), phase.name()));
        self.subjects.retain(|other| *other != subject);
    }

    /// The subjects of one round, in rotated order, so that a subject does not always follow the same one.
    fn turn(&self, round: usize) -> Vec<Subject> {
        let mut subjects = self.subjects.clone();
        let count = subjects.len();
        subjects.rotate_left(round % count.max(1));
        subjects
    }

    fn measure_calls(&mut self, phases: &[Phase]) {
        let mut spent = BTreeMap::<(Metric, Subject), Spent>::new();
        for round in 0..self.size.rounds {
            eprintln!("round {} of {}", round + 1, self.size.rounds);
            for subject in self.turn(round) {
                if let Err((phase, problem)) = self.measure_calls_of(subject, phases, &mut spent) {
                    self.drop_out(subject, phase, &problem);
                }
            }
        }
        for ((metric, subject), spent) in spent {
            self.report.sample(metric, subject, spent.per_call());
        }
    }

    fn measure_calls_of(
        &mut self,
        subject: Subject,
        phases: &[Phase],
        spent: &mut BTreeMap<(Metric, Subject), Spent>,
    ) -> Result<(), (Phase, io::Error)> {
        let limit = if subject.is_rival() { self.size.rival_max } else { OURS_MAX };
        if subject == Subject::Direct {
            if phases.contains(&Phase::Small) {
                let times = self.measure_direct().map_err(|problem| (Phase::Small, problem))?;
                self.report_times(subject, times);
            }
            return Ok(());
        }
        let running = self.stage.start(subject, 1).map_err(|problem| (phases[0], problem))?;
        for phase in phases {
            let failed = |problem| (*phase, problem);
            let count = if *phase == Phase::Small { 1 } else { SESSIONS };
            let mut sessions = open(&running, count).map_err(failed)?;
            let gateway = running.gateway(&self.stage.echo);
            let cpu = || gateway.iter().map(|process| process.cpu()).sum::<Duration>();
            if *phase == Phase::Small {
                warm_up(&mut sessions[0], limit / 4).map_err(failed)?;
                let before = cpu();
                let times = measure_small(&mut sessions[0], self.size.small_calls, limit).map_err(failed)?;
                let spent = spent.entry((Metric::CpuSmall, subject)).or_default();
                spent.add(cpu().saturating_sub(before), times.len());
                self.report_times(subject, times);
            } else {
                let before = cpu();
                let start = Instant::now();
                let load = measure_load(&mut sessions, self.size.load_calls, limit).map_err(failed)?;
                let took = start.elapsed();
                if load.failed > 0 {
                    return Err(failed(io::Error::other(format!("failed {} of {} calls", load.failed, load.calls))));
                }
                let spent = spent.entry((Metric::CpuLoad, subject)).or_default();
                spent.add(cpu().saturating_sub(before), load.calls);
                self.report.sample(Metric::Load, subject, load.calls as f64 / took.as_secs_f64());
            }
        }
        Ok(())
    }

    fn report_times(&mut self, subject: Subject, times: Vec<Duration>) {
        let [p50, p99] = percentiles(times);
        self.report.sample(Metric::SmallP50, subject, p50);
        self.report.sample(Metric::SmallP99, subject, p99);
    }

    fn measure_direct(&self) -> io::Result<Vec<Duration>> {
        let stage = relay::Stage::set(None)?;
        let mut session = pipes::Session::open(&stage, relay::Subject::Direct)?;
        let mut call = pipes::Request::call(&session.echo_tool, &format!(r#"{{"text":"{}"}}"#, "x".repeat(90)));
        let mut times = Vec::with_capacity(self.size.small_calls);
        for round in 0..WARM_UP_CALLS + self.size.small_calls {
            let before = Instant::now();
            session.ask(&mut call, None)?;
            if round >= WARM_UP_CALLS {
                times.push(before.elapsed());
            }
        }
        Ok(times)
    }

    fn measure_memory(&mut self) {
        eprintln!("memory");
        for subject in self.subjects.clone().into_iter().filter(|subject| subject.takes_many()) {
            let measured = self.stage.start(subject, BACKENDS).and_then(|running| {
                let _session = open(&running, 1)?;
                thread::sleep(SETTLE);
                let servers = running.servers(&self.stage.echo).len();
                if servers < BACKENDS {
                    return Err(io::Error::other(format!("started {servers} of {BACKENDS} servers")));
                }
                Ok(running.gateway(&self.stage.echo).iter().map(|process| process.memory()).sum::<u64>())
            });
            match measured {
                Ok(bytes) => self.report.sample(Metric::Rss, subject, bytes as f64 / 1e6),
                Err(problem) => self.report.note(format!("memory of {} is not read: it {problem}", subject.name())),
            }
        }
    }

    fn measure_crashes(&mut self) {
        eprintln!("crashes");
        for round in 0..self.size.crashes {
            match relay::Stage::set(None).and_then(|stage| bare_start(&stage)) {
                Ok(took) => self.report.sample(Metric::Crash, Subject::Direct, milliseconds(took)),
                Err(problem) => self.drop_out(Subject::Direct, Phase::Crash, &problem),
            }
            for subject in self.turn(round) {
                // One measurement of a rival is enough: it recovers in its own way or never. The hop does not
                // recover.
                if subject == Subject::Outlast || subject.is_rival() && round == 0 {
                    match self.measure_crash(subject) {
                        Ok(took) => {
                            self.report.sample(Metric::Crash, subject, took.map_or(f64::INFINITY, milliseconds));
                        }
                        Err(problem) => self.drop_out(subject, Phase::Crash, &problem),
                    }
                }
            }
            if self.subjects.contains(&Subject::Outlast)
                && let Err(problem) = self.measure_crash_under_load()
            {
                self.drop_out(Subject::Outlast, Phase::Crash, &problem);
            }
        }
    }

    /// How long one client waits for its answer while another client and backends send the most costly messages.
    fn measure_loop(&mut self) {
        eprintln!("hostile input");
        for _ in 0..self.size.rounds.min(3) {
            let measured = self.measure_hostile_calls();
            self.report_wait(Metric::LongestTurn, measured);
            for (metric, kind, servers) in LISTS {
                let measured = self.measure_hostile_lists(kind, servers);
                self.report_wait(metric, measured);
            }
            let measured = self.measure_hostile_updates();
            self.report_wait(Metric::LongestTurnUpdates, measured);
        }
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        if let Some(load) = load.split_whitespace().next() {
            self.report.note(format!("load of the machine at the end of `loop`: {load}"));
        }
    }

    fn report_wait(&mut self, metric: Metric, measured: io::Result<Wait>) {
        match measured {
            Ok(wait) => {
                self.report.sample(metric, Subject::Outlast, milliseconds(wait.turn));
                self.report.sample(Metric::LongestCpuOfWait, Subject::Outlast, milliseconds(wait.cpu));
                self.report.sample(Metric::LongestWait, Subject::Outlast, milliseconds(wait.whole));
            }
            Err(problem) => self.report.note(format!("{metric:?} is not measured: it {problem}")),
        }
    }

    /// Many sessions that were used once, and a restart of the gateway with all their records.
    fn measure_sessions(&mut self) -> io::Result<()> {
        eprintln!("{MANY} sessions");
        let (running, first) = self.stage.start_many(MANY)?;
        let mut one = open(&running, 1)?.remove(0);
        let memory =
            |running: &Running| -> u64 { running.gateway(&self.stage.echo).into_iter().map(Process::memory).sum() };
        let before = memory(&running);
        for _ in 1..MANY {
            // Each session drops its connection, as idle clients do.
            Session::open(&running.address)?;
        }
        thread::sleep(SETTLE);
        let per_session = (memory(&running) as f64 - before as f64) / MANY as f64;
        let disk = self.stage.session_bytes()?;
        running.kill();
        drop(running);
        let (running, again) = self.stage.start_many(MANY)?;
        one.reconnect(&running.address)?;
        if !one.call()? {
            return Err(io::Error::other("lost a session"));
        }
        let restarted = memory(&running).saturating_sub(before) as f64 / MANY as f64;
        let more = again.as_secs_f64() - first.as_secs_f64();
        self.report.sample(Metric::SessionsStart, Subject::Outlast, more * 1e3);
        self.report.sample(Metric::SessionsMemory, Subject::Outlast, per_session / 1e3);
        self.report.sample(Metric::SessionsStored, Subject::Outlast, restarted / 1e3);
        self.report.sample(Metric::SessionsDisk, Subject::Outlast, disk as f64 / 1e6);
        Ok(())
    }

    fn measure_hostile_calls(&self) -> io::Result<Wait> {
        let running = self.stage.start_hostile(&hostile::definitions())?;
        let mut victim = open(&running, 1)?.remove(0);
        let mut attacker = open(&running, 1)?.remove(0);
        let attack = thread::spawn(move || {
            hostile::calls()
                .into_iter()
                .try_for_each(|(tool, arguments)| attacker.call_tool(&tool, &arguments).map(drop))
        });
        let wait = longest_wait(&running, &mut victim, || !attack.is_finished())?;
        attack.join().map_err(|_| io::Error::other("panicked"))??;
        Ok(wait)
    }

    fn measure_hostile_lists(&self, kind: lists::Kind, servers: usize) -> io::Result<Wait> {
        let running = self.stage.start_lists(kind, servers, servers > 1)?;
        let mut victim = open(&running, 1)?.remove(0);
        let end = Instant::now() + LISTS_MAX;
        longest_wait(&running, &mut victim, || Instant::now() < end)
    }

    /// Each notification of the backend becomes one to each session.
    fn measure_hostile_updates(&self) -> io::Result<Wait> {
        let running = self.stage.start_lists(lists::Kind::Updates, 1, false)?;
        let mut victim = open(&running, 1)?.remove(0);
        let mut attacker = open(&running, 1)?.remove(0);
        let mut subscribed = open(&running, SUBSCRIBED)?;
        for session in &mut subscribed {
            session.subscribe(lists::URI)?;
        }
        let attack =
            thread::spawn(move || (0..FLOODS).try_for_each(|_| attacker.call_tool("lists0__n0", "{}").map(drop)));
        let wait = longest_wait(&running, &mut victim, || !attack.is_finished())?;
        attack.join().map_err(|_| io::Error::other("panicked"))??;
        Ok(wait)
    }

    /// From the end of the server to the first call of the same session that succeeds; `None` if none does.
    fn measure_crash(&self, subject: Subject) -> io::Result<Option<Duration>> {
        let running = self.stage.start(subject, 1)?;
        let mut session = open(&running, 1)?.remove(0);
        thread::sleep(READY_FOR);
        let start = Instant::now();
        for server in running.servers(&self.stage.echo) {
            server.kill();
        }
        while start.elapsed() < RECOVERY_MAX {
            match session.call() {
                Ok(true) => return Ok(Some(start.elapsed())),
                Ok(false) => thread::sleep(RETRY_PAUSE),
                // Anything but an answer means that the caller has lost this connection.
                Err(_) => return Ok(None),
            }
        }
        Ok(None)
    }

    fn measure_crash_under_load(&mut self) -> io::Result<()> {
        let running = self.stage.start(Subject::Outlast, 1)?;
        let mut sessions = open(&running, SESSIONS)?;
        thread::sleep(READY_FOR);
        let mut load = Load::start(&mut sessions)?;
        let start = Instant::now();
        while start.elapsed() < AROUND_KILL {
            load.step(&mut sessions)?;
        }
        load.pause = Duration::ZERO;
        for server in running.servers(&self.stage.echo) {
            server.kill();
        }
        let killed = Instant::now();
        while killed.elapsed() < AROUND_KILL {
            load.step(&mut sessions)?;
        }
        let hung = load.finish(&mut sessions);
        self.report.sample(Metric::CrashHung, Subject::Outlast, hung as f64);
        self.report.sample(Metric::CrashFailed, Subject::Outlast, load.failed as f64);
        self.report.sample(Metric::CrashPause, Subject::Outlast, milliseconds(load.pause));
        Ok(())
    }
}

/// The longest of each, while a client calls.
#[derive(Clone, Copy, Default)]
struct Wait {
    /// One wait of the client for its answer. It grows while other processes have the cores.
    whole: Duration,
    /// CPU time of the event loop in one wait. The loop may make several turns in it.
    cpu: Duration,
    /// CPU time of one turn of the event loop, which it measures itself.
    turn: Duration,
}

fn longest_wait(running: &Running, client: &mut Session, mut goes_on: impl FnMut() -> bool) -> io::Result<Wait> {
    let gateway = running.process().ok_or_else(|| io::Error::other("ended"))?;
    let mut longest = Wait::default();
    while goes_on() {
        let (start, cpu) = (Instant::now(), gateway.cpu_of_first_thread());
        client.call()?;
        longest.whole = longest.whole.max(start.elapsed());
        longest.cpu = longest.cpu.max(gateway.cpu_of_first_thread().saturating_sub(cpu));
    }
    longest.turn = client::longest_turn(&running.address)?;
    Ok(longest)
}

fn open(running: &Running, count: usize) -> io::Result<Vec<Session>> {
    // A gateway that listens may not have its servers yet.
    let deadline = Instant::now() + RECOVERY_MAX;
    let mut sessions = Vec::new();
    while sessions.len() < count {
        match Session::open(&running.address) {
            Ok(session) => sessions.push(session),
            Err(problem) if deadline < Instant::now() => return Err(problem),
            Err(_) => thread::sleep(RETRY_PAUSE * 20),
        }
    }
    Ok(sessions)
}

fn warm_up(session: &mut Session, limit: Duration) -> io::Result<()> {
    let start = Instant::now();
    for _ in 0..WARM_UP_CALLS {
        session.call()?;
        if start.elapsed() > limit {
            break;
        }
    }
    Ok(())
}

pub(in crate::bench) fn measure_small(
    session: &mut Session,
    calls: usize,
    limit: Duration,
) -> io::Result<Vec<Duration>> {
    let start = Instant::now();
    let mut times = Vec::with_capacity(calls);
    while times.is_empty() || times.len() < calls && start.elapsed() < limit {
        let before = Instant::now();
        if !session.call()? {
            return Err(io::Error::other("failed a call"));
        }
        times.push(before.elapsed());
    }
    Ok(times)
}

pub(in crate::bench) fn measure_load(sessions: &mut [Session], calls: usize, limit: Duration) -> io::Result<Load> {
    let start = Instant::now();
    let mut load = Load::start(sessions)?;
    while load.calls < calls && start.elapsed() < limit {
        load.step(sessions)?;
    }
    match load.finish(sessions) {
        0 => Ok(load),
        hung => Err(io::Error::other(format!("left {hung} calls without an answer"))),
    }
}

/// One call of each session is always in flight.
pub(in crate::bench) struct Load {
    pub calls: usize,
    pub failed: usize,
    /// The longest time that any session waited for an answer.
    pause: Duration,
    asked: Vec<Instant>,
}

impl Load {
    fn start(sessions: &mut [Session]) -> io::Result<Load> {
        sessions.iter_mut().try_for_each(Session::send_call)?;
        Ok(Load { calls: 0, failed: 0, pause: Duration::ZERO, asked: vec![Instant::now(); sessions.len()] })
    }

    fn ready(sessions: &[Session], wait: Duration) -> io::Result<Vec<usize>> {
        let mut sources: Vec<PollFd> =
            sessions.iter().map(|session| PollFd::new(session.as_fd(), PollFlags::POLLIN)).collect();
        poll(&mut sources, PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX))?;
        let is_ready = |source: &PollFd| source.any().unwrap_or(false);
        Ok(sources.iter().enumerate().filter(|(_, source)| is_ready(source)).map(|(at, _)| at).collect())
    }

    fn hear(&mut self, session: &mut Session, at: usize) -> io::Result<()> {
        let answer = session.hear_call()?;
        self.calls += 1;
        self.failed += usize::from(!answer);
        self.pause = self.pause.max(self.asked[at].elapsed());
        Ok(())
    }

    fn step(&mut self, sessions: &mut [Session]) -> io::Result<()> {
        for at in Load::ready(sessions, RETRY_PAUSE * 100)? {
            self.hear(&mut sessions[at], at)?;
            self.asked[at] = Instant::now();
            sessions[at].send_call()?;
        }
        Ok(())
    }

    /// Reads the last answers; returns how many never came.
    fn finish(&mut self, sessions: &mut [Session]) -> usize {
        let mut open: Vec<usize> = (0..sessions.len()).collect();
        let deadline = Instant::now() + RECOVERY_MAX;
        while !open.is_empty() && Instant::now() < deadline {
            let Ok(ready) = Load::ready(sessions, RETRY_PAUSE * 100) else { break };
            for at in ready {
                if let Some(place) = open.iter().position(|other| *other == at) {
                    if self.hear(&mut sessions[at], at).is_err() {
                        return open.len();
                    }
                    open.swap_remove(place);
                }
            }
        }
        open.len()
    }
}

pub(in crate::bench) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
