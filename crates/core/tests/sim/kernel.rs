//! A simulated kernel: processes that linger, ignore SIGTERM and leave grandchildren behind, pipes with a capacity,
//! and two clocks. It knows nothing of MCP; what a process does is decided by the world.

mod child;
mod pipe;

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use outlast_core::exit::Exit;

use crate::{Dice, birth, ms, story::Story};
pub(crate) use child::{Child, Heard};
pub(crate) use pipe::{FromChild, Lines, Outbox, Read, ToChild};
use pipe::{Pipe, PipeId};

pub(crate) type Pid = u32;

/// How long a process that was killed, or whose ancestor outlast is gone, may still be seen.
pub(crate) const END_MAX: Duration = ms(SLOW_KILL + SLOW_REAP + 100);
/// How long an outlast may run after the client that started it is gone: it stops its servers, each with its grace, and
/// these may be an outlast with servers of its own.
pub(crate) const ORPHAN_MAX: Duration = ms(12_000 + SLOW_KILL);
/// Sometimes SIGKILL takes this long: the process is in an uninterruptible system call.
const SLOW_KILL: u64 = 5_000;
/// Sometimes the exit status follows this long after the pipes of the process were closed.
const SLOW_REAP: u64 = 1_200;
/// The wall clock at the beginning of a world, in seconds.
const WALL_BEGAN: u64 = 1_700_000_000;

pub(crate) struct Kernel {
    pub dice: Dice,
    pub story: Story,
    pub born: Instant,
    /// The monotonic clock.
    pub now: Instant,
    /// How far the wall clock is ahead of the monotonic one, in milliseconds: it can be set back and forth.
    wall_ahead: i64,
    /// No further faults: processes obey, and the kernel is quick.
    pub is_calm: bool,
    /// How long an outlast may run after its client is gone. It grows with each pause of the whole machine.
    orphan_max: Duration,
    processes: BTreeMap<Pid, Process>,
    pipes: BTreeMap<PipeId, Pipe>,
    /// Planned events, in the order of their times.
    agenda: BTreeMap<(Instant, u64), Plan>,
    next_pid: Pid,
    next_pipe: PipeId,
    next_plan: u64,
}

pub(crate) struct Process {
    pub parent: Option<Pid>,
    /// The name by which its parent knows it; grandchildren have the name of their parent.
    key: u64,
    pub name: String,
    /// It belongs to outlast: processes below it do not outlive it.
    is_outlast: bool,
    pub reactions: Reactions,
    stdin: PipeId,
    stdout: PipeId,
    state: State,
    /// Signals that the program has not handled, if it handles them itself.
    pub is_terminated: bool,
    /// News of its children.
    news: VecDeque<(u64, News)>,
    /// Since when it must be ending.
    killed_since: Option<Instant>,
    /// Since when the process that started it is gone.
    orphan_since: Option<Instant>,
}

impl Process {
    fn new(order: Order, stdin: PipeId, stdout: PipeId) -> Process {
        let Order { parent, key, name, is_outlast, reactions, .. } = order;
        let news = VecDeque::new();
        let (is_terminated, killed_since, orphan_since) = (false, None, None);
        let state = State::Runs;
        Process {
            parent,
            key,
            name,
            is_outlast,
            reactions,
            stdin,
            stdout,
            state,
            is_terminated,
            news,
            killed_since,
            orphan_since,
        }
    }

    /// Its parent did not start it, and does not wait for its exit.
    fn is_grandchild(&self) -> bool {
        self.orphan_since.is_some() && !self.is_outlast
    }
}

/// How a process reacts when it is asked to end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reactions {
    /// It exits this long after its stdin ended; never, if none.
    pub after_stdin: Option<Duration>,
    /// The same for SIGTERM.
    pub after_term: Option<Duration>,
    /// The program handles both itself.
    pub is_own: bool,
    /// It leaves a grandchild that holds its stdout open.
    pub leaves_grandchild: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Runs,
    /// Its pipes are closed; the exit status follows.
    Exits,
}

#[derive(Debug)]
enum Plan {
    Tell(Pid, u64, News),
    Exit(Pid, Exit),
    Reap(Pid, Exit),
    /// The start failed.
    FailStart(Pid),
    Swept(Pid, u64),
}

/// What a parent hears of a child.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum News {
    Started { pid: Pid },
    StartFailed,
    Exited(Exit),
    Swept,
}

/// What a parent asks the kernel to start.
pub(crate) struct Order {
    pub parent: Option<Pid>,
    pub key: u64,
    pub name: String,
    pub is_outlast: bool,
    pub reactions: Reactions,
    /// No process comes of it.
    pub fails: bool,
}

impl Kernel {
    pub(crate) fn new(seed: u64) -> Kernel {
        let born = birth();
        Kernel {
            dice: Dice::new(seed),
            story: Story::default(),
            born,
            now: born,
            wall_ahead: 0,
            is_calm: false,
            orphan_max: ORPHAN_MAX,
            processes: BTreeMap::new(),
            pipes: BTreeMap::new(),
            agenda: BTreeMap::new(),
            next_pid: 100,
            next_pipe: 1,
            next_plan: 0,
        }
    }

    // ---- clocks ---------------------------------------------------------------------------------

    /// The wall clock since 1970.
    pub(crate) fn wall(&self) -> Duration {
        let began = Duration::from_secs(WALL_BEGAN) + self.now.duration_since(self.born);
        let ahead = ms(self.wall_ahead.unsigned_abs());
        if self.wall_ahead < 0 { began - ahead } else { began + ahead }
    }

    pub(crate) fn unix(&self) -> f64 {
        self.wall().as_secs_f64()
    }

    /// The wall clock is set, or the computer was suspended: the monotonic clock does not count that time.
    pub(crate) fn jump_wall(&mut self, ms: i64) {
        self.wall_ahead += ms;
        self.tell("clock", &format_args!("the wall clock jumps by {ms} ms"));
    }

    /// No process runs for a while, and the monotonic clock continues: every timer fires late.
    pub(crate) fn stall(&mut self, time: Duration) {
        self.tell("clock", &format_args!("no process runs for {time:?}"));
        self.orphan_max += time;
        self.pass_to(self.now + time);
    }

    /// When the next planned event is due.
    pub(crate) fn next_plan(&self) -> Option<Instant> {
        self.agenda.keys().next().map(|(at, _)| *at)
    }

    /// Moves the monotonic clock, and carries out what is due on the way.
    pub(crate) fn pass_to(&mut self, to: Instant) {
        while let Some(entry) = self.agenda.first_entry()
            && entry.key().0 <= to
        {
            let (at, _) = *entry.key();
            let plan = entry.remove();
            self.now = self.now.max(at);
            self.carry_out(plan);
        }
        self.now = self.now.max(to);
    }

    fn plan(&mut self, lag: Duration, plan: Plan) {
        self.next_plan += 1;
        self.agenda.insert((self.now + lag, self.next_plan), plan);
    }

    pub(crate) fn tell(&mut self, mark: &str, what: &impl std::fmt::Debug) {
        self.story.tell(self.now.duration_since(self.born), mark, what);
    }

    // ---- processes ------------------------------------------------------------------------------

    /// Starts a process and returns its id, and the ends of its pipes. The start is reported later; the process
    /// runs at once.
    pub(crate) fn spawn(&mut self, order: Order) -> Pid {
        let pid = self.next_pid;
        self.next_pid += 1;
        let (stdin, stdout) = (self.pipe(), self.pipe());
        self.tell("kernel", &format_args!("process {pid} is {} of {:?}", order.name, order.parent));
        let fails = order.fails;
        self.processes.insert(pid, Process::new(order, stdin, stdout));
        let lag = ms(self.dice.below(30));
        match fails {
            true => self.plan(lag, Plan::FailStart(pid)),
            false => self.tell_parent(pid, lag, News::Started { pid }),
        }
        pid
    }

    fn tell_parent(&mut self, pid: Pid, lag: Duration, news: News) {
        let process = &self.processes[&pid];
        if let Some(parent) = process.parent {
            self.plan(lag, Plan::Tell(parent, process.key, news));
        }
    }

    pub(crate) fn next_news(&mut self, pid: Pid) -> Option<(u64, News)> {
        self.processes.get_mut(&pid)?.news.pop_front()
    }

    pub(crate) fn has_news(&self, pid: Pid) -> bool {
        self.processes.get(&pid).is_some_and(|process| !process.news.is_empty())
    }

    pub(crate) fn get(&self, pid: Pid) -> Option<&Process> {
        self.processes.get(&pid).filter(|process| process.state == State::Runs)
    }

    pub(crate) fn get_mut(&mut self, pid: Pid) -> Option<&mut Process> {
        self.processes.get_mut(&pid).filter(|process| process.state == State::Runs)
    }

    pub(crate) fn runs(&self, pid: Pid) -> bool {
        self.get(pid).is_some()
    }

    /// The process began to exit, and was not reaped.
    pub(crate) fn is_exiting(&self, pid: Pid) -> bool {
        self.processes.get(&pid).is_some_and(|process| process.state == State::Exits)
    }

    /// SIGKILL was sent to it; the exit may take a while.
    pub(crate) fn is_killed(&self, pid: Pid) -> bool {
        self.processes.get(&pid).is_some_and(|process| process.killed_since.is_some())
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = (Pid, &Process)> {
        self.processes.iter().filter(|(_, process)| process.state == State::Runs).map(|(pid, process)| (*pid, process))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.processes.is_empty()
    }

    /// Ends the process from inside.
    pub(crate) fn exit(&mut self, pid: Pid, exit: Exit) {
        self.exit_after(pid, Duration::ZERO, exit);
    }

    pub(crate) fn exit_after(&mut self, pid: Pid, lag: Duration, exit: Exit) {
        self.plan(lag, Plan::Exit(pid, exit));
        if lag.is_zero() {
            self.pass_to(self.now);
        }
    }

    pub(crate) fn terminate(&mut self, pid: Pid) {
        let Some(process) = self.get_mut(pid) else { return };
        if process.reactions.is_own {
            process.is_terminated = true;
        } else if let Some(lag) = process.reactions.after_term {
            self.exit_after(pid, lag, Exit::Signal(15));
        }
    }

    pub(crate) fn kill(&mut self, pid: Pid) {
        let now = self.now;
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.killed_since.get_or_insert(now);
        let lag = if !self.is_calm && self.dice.one_in(40) { SLOW_KILL } else { self.dice.below(20) };
        self.plan(ms(lag), Plan::Exit(pid, Exit::Signal(9)));
    }

    /// Kills what is left of a child's group, and reports it to the parent.
    pub(crate) fn sweep(&mut self, parent: Pid, key: u64) {
        for pid in self.group(parent, key) {
            self.kill(pid);
        }
        let lag = ms(self.dice.below(60));
        self.plan(lag, Plan::Swept(parent, key));
    }

    fn group(&self, parent: Pid, key: u64) -> Vec<Pid> {
        let is_in = |process: &Process| process.parent == Some(parent) && process.key == key;
        self.processes.iter().filter(|(_, process)| is_in(process)).map(|(pid, _)| *pid).collect()
    }

    fn carry_out(&mut self, plan: Plan) {
        match plan {
            Plan::Tell(parent, key, news) => {
                if let Some(process) = self.processes.get_mut(&parent) {
                    process.news.push_back((key, news));
                }
            }
            Plan::Exit(pid, exit) => self.begin_exit(pid, exit),
            Plan::Reap(pid, exit) => {
                if !self.processes[&pid].is_grandchild() {
                    self.tell_parent(pid, Duration::ZERO, News::Exited(exit));
                }
                self.processes.remove(&pid);
            }
            Plan::FailStart(pid) => {
                if !self.runs(pid) {
                    return;
                }
                self.tell_parent(pid, Duration::ZERO, News::StartFailed);
                self.processes.remove(&pid);
            }
            Plan::Swept(parent, key) => match self.group(parent, key).is_empty() {
                true => self.plan(Duration::ZERO, Plan::Tell(parent, key, News::Swept)),
                false => self.plan(ms(20), Plan::Swept(parent, key)),
            },
        }
    }

    /// The pipes of a process are closed before its parent hears of the exit, sometimes long before.
    fn begin_exit(&mut self, pid: Pid, exit: Exit) {
        let Some(process) = self.processes.get_mut(&pid).filter(|process| process.state == State::Runs) else { return };
        process.state = State::Exits;
        let (stdin, stdout, is_outlast) = (process.stdin, process.stdout, process.is_outlast);
        let (parent, key, name, reactions) = (process.parent, process.key, process.name.clone(), process.reactions);
        self.tell("kernel", &format_args!("process {pid} ({name}) exits: {exit:?}"));
        // Without an outlast above it, the keeper ends the grandchild as well.
        if reactions.leaves_grandchild && parent.is_some_and(|parent| self.runs(parent)) {
            let grandchild = self.next_pid;
            self.next_pid += 1;
            self.pipes.entry(stdout).and_modify(Pipe::share);
            let reactions = Reactions { after_stdin: None, after_term: None, is_own: false, leaves_grandchild: false };
            let name = format!("grandchild of {pid}");
            let order = Order { parent, key, name, is_outlast: false, reactions, fails: false };
            let stdin = self.pipe();
            let process = Process { orphan_since: Some(self.now), ..Process::new(order, stdin, stdout) };
            self.processes.insert(grandchild, process);
        }
        self.close_reader(stdin);
        self.close_writer(stdout);
        // The ends of its children's pipes, if it has not closed them itself.
        let ends = |process: &Process| (process.parent == Some(pid)).then_some((process.stdin, process.stdout));
        for (stdin, stdout) in self.processes.values().filter_map(ends).collect::<Vec<_>>() {
            self.close_writer(stdin);
            self.close_reader(stdout);
        }
        let lag = if !self.is_calm && self.dice.one_in(12) { self.dice.below(SLOW_REAP) } else { self.dice.below(30) };
        self.plan(ms(lag), Plan::Reap(pid, exit));
        match is_outlast {
            true => self.end_below(pid),
            false => {
                let now = self.now;
                let orphans = self.processes.values_mut().filter(|process| process.parent == Some(pid));
                orphans.for_each(|process| process.orphan_since = Some(now));
            }
        }
    }

    /// The keeper of a process of outlast ends what is left below it.
    fn end_below(&mut self, pid: Pid) {
        let below = self.below(pid);
        self.tell("kernel", &format_args!("the keeper of {pid} ends {below:?}"));
        below.into_iter().for_each(|pid| self.kill(pid));
    }

    /// All processes below one.
    pub(crate) fn below(&self, pid: Pid) -> Vec<Pid> {
        let mut below = vec![pid];
        let mut next = 0;
        while next < below.len() {
            let parent = below[next];
            next += 1;
            below.extend(
                self.processes.iter().filter(|(_, process)| process.parent == Some(parent)).map(|(pid, _)| *pid),
            );
        }
        below.remove(0);
        below
    }

    /// No process outlives its time: killed ones, what is below an outlast that is gone, and an outlast whose client is
    /// gone.
    pub(crate) fn check(&self) {
        for (pid, process) in &self.processes {
            let age = |since: Option<Instant>| since.map_or(Duration::ZERO, |since| self.now.duration_since(since));
            let (killed, alone) = (age(process.killed_since), age(process.orphan_since));
            assert!(killed <= END_MAX, "process {pid} ({}) still runs {killed:?} after its end was due", process.name);
            assert!(
                alone <= self.orphan_max,
                "process {pid} ({}) still runs {alone:?} after the process that started it",
                process.name
            );
            let is_alone = process.parent.is_some_and(|parent| !self.processes.contains_key(&parent));
            let is_due = process.killed_since.or(process.orphan_since).is_some();
            assert!(!is_alone || is_due, "process {pid} ({}) runs on without its parent", process.name);
        }
    }
}
