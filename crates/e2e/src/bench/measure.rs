//! The measurements: each is made for every subject in turn.

use std::{
    collections::BTreeMap,
    io, thread,
    time::{Duration, Instant},
};

use super::{
    gateway::measure::milliseconds,
    session::{Request, Session},
    subject::{Stage, Subject},
    table::{Metric, Report},
};

const DEEP: usize = 64;
const RELOAD_DEEP: usize = 16;
const MEGABYTE: usize = 1_000_000;
pub(super) const WARM_UP_CALLS: usize = 300;
/// The restart policy restarts a server at once after its first crash if it was ready for 5 s.
pub(super) const READY_FOR: Duration = Duration::from_millis(5_200);
/// A subject that has not recovered by then counts as one that never does.
pub(super) const RECOVERY_MAX: Duration = Duration::from_secs(10);
/// The pause between failed calls of a subject that answers its failures at once.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(1);
const RELOAD_MAX: Duration = Duration::from_secs(30);
/// Long enough for start-up work to finish, before "idle" is measured.
const SETTLE: Duration = Duration::from_millis(500);
/// No single measurement of a working subject takes this long.
const GUARD: Duration = Duration::from_secs(180);

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Phase {
    Small,
    Deep,
    Big,
    Rss,
    Start,
    Crash,
    Reload,
}

impl Phase {
    pub(super) const ALL: [Self; 7] =
        [Self::Small, Self::Deep, Self::Big, Self::Rss, Self::Start, Self::Crash, Self::Reload];

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Deep => "deep",
            Self::Big => "big",
            Self::Rss => "rss",
            Self::Start => "start",
            Self::Crash => "crash",
            Self::Reload => "reload",
        }
    }
}

struct Size {
    rounds: usize,
    small_calls: usize,
    deep_calls: usize,
    big_calls: usize,
    relayed: usize,
    starts: usize,
    crashes: usize,
    reloads: usize,
    /// The longest time for one measurement of a rival; its results by then are its sample.
    rival_max: Duration,
    rival_starts: usize,
}

const FULL: Size = Size {
    rounds: 7,
    small_calls: 10_000,
    deep_calls: 100_000,
    big_calls: 200,
    relayed: 1_000 * MEGABYTE,
    starts: 20,
    crashes: 5,
    reloads: 3,
    rival_max: Duration::from_secs(5),
    rival_starts: 5,
};

const QUICK: Size = Size {
    rounds: 3,
    small_calls: 5_000,
    deep_calls: 20_000,
    big_calls: 100,
    relayed: 100 * MEGABYTE,
    starts: 7,
    crashes: 3,
    reloads: 1,
    rival_max: Duration::from_secs(2),
    rival_starts: 2,
};

/// CPU time of the measured processes, and the number of calls; summed, because the clock is coarse.
#[derive(Default)]
pub(super) struct Spent {
    cpu: Duration,
    calls: usize,
}

impl Spent {
    pub(super) fn add(&mut self, cpu: Duration, calls: usize) {
        self.cpu += cpu;
        self.calls += calls;
    }

    /// In microseconds.
    pub(super) fn per_call(&self) -> f64 {
        self.cpu.as_secs_f64() * 1e6 / self.calls as f64
    }
}

pub(super) struct Bench<'a> {
    stage: &'a Stage,
    size: Size,
    /// The subjects that are still measured; a subject that fails is removed with a note.
    subjects: Vec<Subject>,
    report: Report,
}

impl<'a> Bench<'a> {
    pub(super) fn new(stage: &'a Stage, is_quick: bool) -> Self {
        let size = if is_quick { QUICK } else { FULL };
        let mut report = Report::new(size.rounds, is_quick);
        let mut subjects = Vec::new();
        for subject in Subject::ALL {
            match stage.absence(subject) {
                None => subjects.push(subject),
                Some(why) => report.note(format!("{} is not measured: {why}", subject.name())),
            }
        }
        Self { stage, size, subjects, report }
    }

    pub(super) fn run(mut self, phases: &[Phase]) -> Report {
        let calls: Vec<Phase> =
            [Phase::Small, Phase::Deep, Phase::Big].into_iter().filter(|phase| phases.contains(phase)).collect();
        if !calls.is_empty() {
            self.measure_calls(&calls);
        }
        if phases.contains(&Phase::Rss) {
            self.measure_memory();
        }
        if phases.contains(&Phase::Start) {
            self.measure_starts();
        }
        if phases.contains(&Phase::Crash) {
            self.measure_crashes();
        }
        if phases.contains(&Phase::Reload) {
            self.measure_reloads();
        }
        self.report
    }

    /// The subjects of one round, in rotated order, so that a subject does not always follow the same one.
    fn turn(&self, round: usize) -> Vec<Subject> {
        let mut subjects = self.subjects.clone();
        let count = subjects.len();
        subjects.rotate_left(round % count.max(1));
        subjects
    }

    fn drop_out(&mut self, subject: Subject, phase: Phase, problem: &io::Error) {
        self.report.note(format!("{} dropped out at `{}`: it {problem}", subject.name(), phase.name()));
        self.subjects.retain(|other| *other != subject);
    }

    fn open_all(&mut self, subjects: Vec<Subject>, phase: Phase) -> Vec<(Subject, Session)> {
        let mut sessions = Vec::new();
        for subject in subjects {
            match Session::open(self.stage, subject) {
                Ok(session) => sessions.push((subject, session)),
                Err(problem) => self.drop_out(subject, phase, &problem),
            }
        }
        sessions
    }

    fn measure_calls(&mut self, phases: &[Phase]) {
        let mut spent = BTreeMap::<(Metric, Subject), Spent>::new();
        for round in 0..self.size.rounds {
            eprintln!("round {} of {}", round + 1, self.size.rounds);
            let mut sessions = self.open_all(self.turn(round), phases[0]);
            for phase in phases {
                for (subject, session) in &mut sessions {
                    if !self.subjects.contains(subject) {
                        continue;
                    }
                    let limit = if subject.is_rival() { self.size.rival_max } else { GUARD };
                    let _guard = session.guard(GUARD);
                    let relays = if subject.is_relay() { session.relays(self.stage) } else { Vec::new() };
                    let cpu = || relays.iter().map(|process| process.cpu()).sum::<Duration>();
                    let before = cpu();
                    let measured = match phase {
                        Phase::Small => measure_small(session, self.size.small_calls, limit),
                        Phase::Deep => measure_deep(session, self.size.deep_calls, limit),
                        _ => measure_big(session, self.size.big_calls, limit),
                    };
                    match measured {
                        Ok(measured) => {
                            for (metric, value) in measured.values {
                                self.report.sample(metric, *subject, value);
                            }
                            let metric = match phase {
                                Phase::Small => Metric::CpuSmall,
                                Phase::Deep => Metric::CpuDeep,
                                _ => Metric::CpuBig,
                            };
                            let spent = spent.entry((metric, *subject)).or_default();
                            spent.add(cpu().saturating_sub(before), measured.calls);
                        }
                        Err(problem) => self.drop_out(*subject, *phase, &problem),
                    }
                }
            }
        }
        for ((metric, subject), spent) in spent {
            if subject.is_relay() {
                self.report.sample(metric, subject, spent.per_call());
            }
        }
    }

    fn measure_memory(&mut self) {
        eprintln!("memory");
        for subject in self.subjects.clone().into_iter().filter(|subject| subject.is_relay()) {
            if let Err(problem) = self.measure_memory_of(subject) {
                self.drop_out(subject, Phase::Rss, &problem);
            }
        }
    }

    fn measure_memory_of(&mut self, subject: Subject) -> io::Result<()> {
        let mut session = Session::open(self.stage, subject)?;
        let _guard = session.guard(GUARD);
        thread::sleep(SETTLE);
        let resident = |session: &Session| {
            let bytes: u64 = session.relays(self.stage).iter().map(|process| process.memory()).sum();
            bytes as f64 / MEGABYTE as f64
        };
        self.report.sample(Metric::RssIdle, subject, resident(&session));
        let calls = self.size.relayed / MEGABYTE;
        let limit = if subject.is_rival() { self.size.rival_max * 4 } else { GUARD };
        let measured = measure_big(&mut session, calls, limit)?;
        if measured.calls < calls {
            let (name, done) = (subject.name(), measured.calls);
            self.report.note(format!("memory of {name} is read after {done} MB instead of {calls}: it is too slow"));
        }
        self.report.sample(Metric::RssAfter, subject, resident(&session));
        Ok(())
    }

    fn measure_starts(&mut self) {
        eprintln!("starts");
        for round in 0..self.size.starts {
            for subject in self.turn(round) {
                if subject.is_rival() && self.size.rival_starts <= round {
                    continue;
                }
                let start = Instant::now();
                let started = Session::start(self.stage, subject).and_then(|mut session| {
                    session.initialize()?;
                    Ok((start.elapsed(), session))
                });
                match started {
                    Ok((took, _session)) => self.report.sample(Metric::Start, subject, milliseconds(took)),
                    Err(problem) => self.drop_out(subject, Phase::Start, &problem),
                }
            }
        }
    }

    /// All sessions first run for long enough; then the server of each is killed, one after the other.
    fn measure_crashes(&mut self) {
        eprintln!("crashes");
        let mut rounds = Vec::new();
        for round in 0..self.size.crashes {
            let mut subjects = self.turn(round);
            // One measurement of a rival is enough: it recovers in its own way or never.
            subjects.retain(|subject| *subject == Subject::Outlast || subject.is_rival() && round == 0);
            rounds.push(self.open_all(subjects, Phase::Crash));
        }
        thread::sleep(READY_FOR);
        for sessions in rounds {
            match bare_start(self.stage) {
                Ok(took) => self.report.sample(Metric::Crash, Subject::Direct, milliseconds(took)),
                Err(problem) => self.drop_out(Subject::Direct, Phase::Crash, &problem),
            }
            for (subject, session) in sessions {
                let took = self.measure_crash(session);
                self.report.sample(Metric::Crash, subject, took.map_or(f64::INFINITY, milliseconds));
            }
        }
    }

    /// From the end of the server to the first call that succeeds; `None` if none does.
    fn measure_crash(&self, mut session: Session) -> Option<Duration> {
        let server = session.server(self.stage)?;
        let mut call = Request::call(&session.echo_tool, "{}");
        let start = Instant::now();
        let deadline = start + RECOVERY_MAX;
        server.kill();
        while Instant::now() < deadline {
            // Anything but an answer in time means that the caller has lost this connection.
            if !session.ask(&mut call, Some(deadline)).ok()?.is_failed {
                return Some(start.elapsed());
            }
            thread::sleep(RETRY_PAUSE);
        }
        None
    }

    fn measure_reloads(&mut self) {
        eprintln!("reloads");
        if !self.subjects.contains(&Subject::Outlast) {
            return;
        }
        let mut total = Reload::default();
        for _ in 0..self.size.reloads {
            match self.measure_reload() {
                Ok(reload) => {
                    self.report.sample(Metric::ReloadTook, Subject::Outlast, milliseconds(reload.took));
                    self.report.sample(Metric::ReloadPause, Subject::Outlast, milliseconds(reload.pause));
                    total.calls += reload.calls;
                    total.failed += reload.failed;
                }
                Err(problem) => return self.drop_out(Subject::Outlast, Phase::Reload, &problem),
            }
        }
        self.report.sample(Metric::ReloadFailed, Subject::Outlast, total.failed as f64);
        let (reloads, calls) = (self.size.reloads, total.calls);
        self.report.note(format!("{calls} calls were made around the reloads ({reloads}), {RELOAD_DEEP} at a time"));
    }

    fn measure_reload(&self) -> io::Result<Reload> {
        let mut session = Session::open(self.stage, Subject::Outlast)?;
        let _guard = session.guard(GUARD);
        let tool = session.restart_tool.clone().ok_or_else(|| io::Error::other("lists no tool `restart_server`"))?;
        let mut restart = Request::call(&tool, r#"{"reason":"a benchmark"}"#);
        let mut call = small_call(&session);
        let mut flow = Flow::start(&mut session, &mut call, RELOAD_DEEP)?;
        let around = 2_000;
        flow.run(&mut session, &mut call, |flow| flow.answered < around)?;
        let asked = Instant::now();
        let restart = session.send(&mut restart)?;
        flow.other = Some(restart);
        flow.pause = Duration::ZERO;
        flow.run(&mut session, &mut call, |flow| flow.other.is_some() && asked.elapsed() < RELOAD_MAX)?;
        let took = asked.elapsed();
        if flow.other.is_some() {
            return Err(io::Error::other("did not answer `restart_server` in time"));
        }
        let until = flow.answered + around;
        flow.run(&mut session, &mut call, |flow| flow.answered < until)?;
        flow.finish(&mut session)?;
        Ok(Reload { took, pause: flow.pause, calls: flow.answered, failed: flow.failed })
    }
}

/// The time from the start of the server itself to its first answer to a call.
pub(super) fn bare_start(stage: &Stage) -> io::Result<Duration> {
    let start = Instant::now();
    let mut session = Session::start(stage, Subject::Direct)?;
    session.initialize()?;
    session.ask(&mut Request::call("echo", "{}"), Some(Instant::now() + RECOVERY_MAX))?;
    Ok(start.elapsed())
}

#[derive(Default)]
struct Reload {
    took: Duration,
    pause: Duration,
    calls: usize,
    failed: usize,
}

struct Measured {
    calls: usize,
    values: Vec<(Metric, f64)>,
}

/// About a hundred bytes of arguments.
fn small_call(session: &Session) -> Request {
    Request::call(&session.echo_tool, &format!(r#"{{"text":"{}"}}"#, "x".repeat(90)))
}

fn measure_small(session: &mut Session, calls: usize, limit: Duration) -> io::Result<Measured> {
    let mut call = small_call(session);
    let mut start = Instant::now();
    let mut warm_ups = 0;
    while warm_ups < WARM_UP_CALLS && start.elapsed() < limit / 4 {
        session.ask(&mut call, None)?;
        warm_ups += 1;
    }
    start = Instant::now();
    let mut times = Vec::with_capacity(calls);
    while times.is_empty() || times.len() < calls && start.elapsed() < limit {
        let before = Instant::now();
        if session.ask(&mut call, None)?.is_failed {
            return Err(io::Error::other("failed a call"));
        }
        times.push(before.elapsed());
    }
    let calls = times.len() + warm_ups;
    let [p50, p99] = percentiles(times);
    Ok(Measured { calls, values: vec![(Metric::SmallP50, p50), (Metric::SmallP99, p99)] })
}

/// p50 and p99, in microseconds.
pub(super) fn percentiles(mut times: Vec<Duration>) -> [f64; 2] {
    times.sort_unstable();
    [0.5, 0.99].map(|share| times[(times.len() as f64 * share) as usize].as_secs_f64() * 1e6)
}

fn measure_deep(session: &mut Session, calls: usize, limit: Duration) -> io::Result<Measured> {
    let mut call = small_call(session);
    let start = Instant::now();
    let mut flow = Flow::start(session, &mut call, DEEP)?;
    flow.run(session, &mut call, |flow| flow.answered < calls && start.elapsed() < limit)?;
    flow.finish(session)?;
    let took = start.elapsed();
    if flow.failed != 0 {
        return Err(io::Error::other(format!("failed {} calls", flow.failed)));
    }
    Ok(Measured { calls: flow.answered, values: vec![(Metric::Deep, flow.answered as f64 / took.as_secs_f64())] })
}

fn measure_big(session: &mut Session, calls: usize, limit: Duration) -> io::Result<Measured> {
    let mut call = Request::call(&session.echo_tool, &format!(r#"{{"text":"{}"}}"#, "x".repeat(MEGABYTE)));
    let start = Instant::now();
    let mut done = 0;
    while done == 0 || done < calls && start.elapsed() < limit {
        let answer = session.ask(&mut call, None)?;
        if answer.is_failed || answer.line.len() < MEGABYTE {
            return Err(io::Error::other("failed a big call"));
        }
        done += 1;
    }
    let rate = (done * MEGABYTE) as f64 / 1e6 / start.elapsed().as_secs_f64();
    Ok(Measured { calls: done, values: vec![(Metric::Big, rate)] })
}

/// A number of calls kept in flight: each answer is followed by the next call, in a write of its own as clients do.
struct Flow {
    open: Vec<u64>,
    /// One request of another kind in between, until it is answered.
    other: Option<u64>,
    answered: usize,
    failed: usize,
    /// The longest time between two answers.
    pause: Duration,
    last: Instant,
}

impl Flow {
    fn start(session: &mut Session, call: &mut Request, depth: usize) -> io::Result<Self> {
        let open = (0..depth).map(|_| session.send(call)).collect::<io::Result<_>>()?;
        Ok(Self { open, other: None, answered: 0, failed: 0, pause: Duration::ZERO, last: Instant::now() })
    }

    fn run(&mut self, session: &mut Session, call: &mut Request, goes_on: impl Fn(&Self) -> bool) -> io::Result<()> {
        while goes_on(self) {
            if self.hear(session)? {
                self.open.push(session.send(call)?);
            }
        }
        Ok(())
    }

    fn finish(&mut self, session: &mut Session) -> io::Result<()> {
        while !self.open.is_empty() {
            self.hear(session)?;
        }
        Ok(())
    }

    /// Reads one answer; returns whether it answers a call of the flow.
    fn hear(&mut self, session: &mut Session) -> io::Result<bool> {
        let answer = session.hear(None)?;
        if self.other == Some(answer.id) {
            if answer.is_failed {
                let line = String::from_utf8_lossy(answer.line);
                return Err(io::Error::other(format!("failed to restart: {line}")));
            }
            self.other = None;
            return Ok(false);
        }
        let Some(place) = self.open.iter().position(|id| *id == answer.id) else {
            return Err(io::Error::other(format!("answered {}, which is not open", answer.id)));
        };
        self.open.swap_remove(place);
        self.answered += 1;
        self.failed += usize::from(answer.is_failed);
        let now = Instant::now();
        self.pause = self.pause.max(now - self.last);
        self.last = now;
        Ok(true)
    }
}
