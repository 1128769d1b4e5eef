//! The side of outlast in process supervision: requests to the keeper and the monitors, their reports, and the
//! recovery when one of them is killed or stopped. Children are started in `monitor.rs`, not here.
//!
//! Each child has a monitor with its own socket, served by a task. If the keeper exits, outlast replaces it by
//! running this program again; the monitors that it forked continue. If a monitor exits, outlast kills the processes
//! that it leaves: they are reparented to the keeper or, if the keeper is gone as well, to outlast, which is a
//! subreaper too (Linux).
#![expect(
    unsafe_code,
    reason = "forks the keeper, joins the reactor, borrows our standard descriptors to hand them on"
)]

use std::{
    collections::{BTreeMap, VecDeque},
    ffi::OsString,
    future::poll_fn,
    io::{self, ErrorKind, IoSlice},
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    pin::Pin,
    process::{Command, Stdio as Standard},
    sync::OnceLock,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        signal::{Signal as Number, kill},
        socket::{
            AddressFamily, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, sendmsg, shutdown, socketpair,
        },
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, fork, getpid},
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{Signal as SignalStream, SignalKind, signal},
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::JoinHandle,
    time::{Sleep, sleep},
};

use super::{
    descendants,
    handover::{Handover, Received},
    keeper,
    monitor::{Pause, SWEEP_MAX},
    pty,
    stops::is_ignored,
    stream::{pipe_from_child, pipe_to_child, set_nonblocking},
    wire::{self, Word},
};
use crate::{
    BootTime, Exit, News, Order, Pipes, Signal, Stdio, cause,
    offload::{Task, offload},
};

/// How long [`ChildProcesses::close`] waits for the monitors and the keeper. They take a second at most, unless a process
/// cannot be killed; then they continue without outlast.
const CLOSE_MAX: Duration = Duration::from_secs(3);

/// A keeper that exits sooner than this after it replaced another one is replaced at the next start of a child, not
/// at once: a child that kills each keeper must not keep the loop busy.
const KEEPER_PAUSE: Duration = Duration::from_secs(1);

/// The bytes of one read from a monitor.
const READ_MAX: usize = 4096;

/// The only argument (`argv[0]`) of a keeper that replaces another one.
const KEEPER_NAME: &str = "outlast-keeper";

/// Attributes that children inherit through the keeper, as they were when outlast started: outlast changes both for
/// itself.
struct Inherited {
    descriptors: Option<(u64, u64)>,
    ignored: Vec<libc::c_int>,
}

static INHERITED: OnceLock<Inherited> = OnceLock::new();

impl Inherited {
    fn save(&self) -> SavedInherited {
        SavedInherited { descriptors: self.descriptors, ignored: self.ignored.clone() }
    }

    fn now() -> Inherited {
        let ignored = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP].into_iter().filter(|signal| is_ignored(*signal));
        Inherited { descriptors: getrlimit(Resource::RLIMIT_NOFILE).ok(), ignored: ignored.collect() }
    }

    /// Runs between fork and exec: makes system calls only.
    fn restore(&self) -> io::Result<()> {
        if let Some((soft, hard)) = self.descriptors {
            setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
        }
        for signal in &self.ignored {
            // SAFETY: the call only sets the signal to be ignored.
            unsafe { libc::signal(*signal, libc::SIG_IGN) };
        }
        Ok(())
    }
}

/// The keeper process, before the runtime starts.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
    pid: Pid,
    /// Children that this process already had, from the program that executed outlast.
    others: Vec<Pid>,
    /// The version of its messages: after an upgrade in place that of an older program.
    protocol: u32,
}

impl Keeper {
    /// Forks the keeper. It runs until its [`ChildProcesses`] is gone, and then ends the remaining processes.
    ///
    /// Must be called before any thread starts: a forked process has only the thread that forked, and would wait
    /// forever for a lock that another thread held. On Linux a second thread is an error here.
    pub fn begin() -> io::Result<Keeper> {
        #[cfg(target_os = "linux")]
        if 1 < std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count) {
            return Err(io::Error::other("the keeper must be forked before any thread exists"));
        }
        INHERITED.get_or_init(Inherited::now);
        let others = children();
        #[cfg(target_os = "linux")]
        // SAFETY: the call only sets an attribute of this process: orphans of a killed keeper and monitor are
        // reparented to it.
        unsafe {
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        }
        let (ours, keepers) = socket_pair()?;
        // SAFETY: there is no other thread (see above), so every lock is free in the new process, and it never
        // returns from the block below.
        match unsafe { fork() }? {
            ForkResult::Child => {
                drop(ours);
                keeper::main(keepers)
            }
            ForkResult::Parent { child } => Ok(Keeper { socket: ours, pid: child, others, protocol: wire::PROTOCOL }),
        }
    }

    /// The keeper and the monitors that the last program of this process left, with the current runtime.
    pub fn restore(
        saved: SavedChildProcesses,
        protocol: KeeperProtocol,
        received: &mut Received,
    ) -> io::Result<ChildProcesses> {
        protocol.check()?;
        let SavedInherited { descriptors, ignored } = saved.inherited;
        INHERITED.get_or_init(|| Inherited { descriptors, ignored });
        let others: Vec<Pid> = saved.others.into_iter().map(Pid::from_raw).collect();
        let socket = received.take(saved.keeper.socket)?;
        let keeper = Keeper { socket, pid: Pid::from_raw(saved.keeper.pid), others, protocol: protocol.0 };
        let mut processes = keeper.attach()?;
        for link in saved.links {
            let (orders, ordered) = unbounded_channel();
            let socket = register(received.take(link.socket)?)?;
            let wire = Wire { socket, outbox: VecDeque::new(), inbox: link.inbox, is_pausing: false, ordered };
            let serial = processes.next_serial;
            processes.next_serial += 1;
            let task = processes.serve(wire, link.key, serial);
            let monitor = Some(Pid::from_raw(link.monitor));
            let stage = match link.pid {
                Some(pid) => Stage::Up { pid },
                None => Stage::Ended { is_sweep_asked: link.is_sweep_asked },
            };
            processes.links.insert(link.key, Link { serial, orders, monitor, stage, task, has_lease: link.has_lease });
        }
        Ok(processes)
    }

    /// Runs this program again as a keeper: outlast has threads by now and cannot fork one.
    fn replace() -> io::Result<Keeper> {
        let (ours, keepers) = socket_pair()?;
        #[cfg(target_os = "linux")]
        let program = "/proc/self/exe"; // The same program, even if its file was replaced.
        #[cfg(not(target_os = "linux"))]
        let program = std::env::current_exe()?;
        let mut command = Command::new(program);
        command.arg0(KEEPER_NAME).stdin(keepers).stdout(Standard::null()).stderr(Standard::null());
        // SAFETY: between fork and exec, this makes system calls only and touches no memory but its own.
        unsafe {
            command.pre_exec(|| INHERITED.get().map_or(Ok(()), Inherited::restore));
        }
        let pid = command.spawn()?.id();
        Ok(Keeper { socket: ours, pid: Pid::from_raw(pid as i32), others: Vec::new(), protocol: wire::PROTOCOL })
    }

    /// Becomes a keeper and does not return, if this process was started as one.
    pub fn become_one_if_asked(args: &[OsString]) {
        let [name] = args else { return };
        if name != KEEPER_NAME {
            return;
        }
        // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and outlast never closes
        // them.
        let stdin = unsafe { BorrowedFd::borrow_raw(libc::STDIN_FILENO) };
        match stdin.try_clone_to_owned() {
            Ok(socket) => keeper::main(socket),
            Err(_) => std::process::exit(1),
        }
    }

    /// Registers with the current runtime.
    pub fn attach(self) -> io::Result<ChildProcesses> {
        let (tell, heard) = unbounded_channel();
        let others = self.others.clone();
        Ok(ChildProcesses {
            child_signals: signal(SignalKind::child())?,
            keeper: Some(KeeperLink::new(self)?),
            replaced_at: None,
            wanted: VecDeque::new(),
            links: BTreeMap::new(),
            next_serial: 1,
            tell,
            heard,
            lost: BTreeMap::new(),
            sweep: None,
            others,
            ready: VecDeque::new(),
            is_closing: false,
            is_first_look: true,
        })
    }
}

/// All children, by key. Dropping it ends them.
#[derive(Debug)]
pub struct ChildProcesses {
    /// `None` if the keeper could not be replaced, or exited too soon; the next spawn starts one.
    keeper: Option<KeeperLink>,
    replaced_at: Option<Instant>,
    /// Sockets for monitors that the keeper has not forked yet.
    wanted: VecDeque<OwnedFd>,
    links: BTreeMap<u64, Link>,
    /// A serial number for each link: a key may be used again while the task of an earlier link still runs.
    next_serial: u64,
    tell: UnboundedSender<(u64, u64, MonitorReport)>,
    /// Bounded by the reports about one child: a few messages for each monitor.
    heard: UnboundedReceiver<(u64, u64, MonitorReport)>,
    /// SIGCHLD: the keeper, or a monitor whose keeper is gone, has exited or stopped.
    child_signals: SignalStream,
    /// Children whose monitor is gone, by key, until they are swept and the caller has been told.
    lost: BTreeMap<u64, Lost>,
    sweep: Option<Sweep>,
    others: Vec<Pid>,
    ready: VecDeque<News>,
    is_closing: bool,
    /// A SIGCHLD that arrived before the handler was installed is missed, so the first poll always looks.
    is_first_look: bool,
}

/// `ChildProcesses` as saved state. The descriptors are kept by a [`Handover`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedChildProcesses {
    keeper: SavedKeeper,
    others: Vec<i32>,
    inherited: SavedInherited,
    links: Vec<SavedLink>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedKeeper {
    socket: i32,
    pid: i32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedInherited {
    descriptors: Option<(u64, u64)>,
    ignored: Vec<i32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedLink {
    key: u64,
    socket: i32,
    monitor: i32,
    /// `None` if the child has ended.
    pid: Option<u32>,
    is_sweep_asked: bool,
    /// The beginning of a message of the monitor.
    inbox: Vec<u8>,
    /// The child has a lease, whose end only its monitor knows. Absent in states of programs without leases.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    has_lease: bool,
}

/// The version of the messages to the keeper, which is a process of an older program after an upgrade. Its monitors have
/// the same version or an older one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeeperProtocol(u32);

impl KeeperProtocol {
    /// Whether this program can speak with it: it knows all versions up to its own.
    pub fn check(self) -> io::Result<()> {
        if (1..=wire::PROTOCOL).contains(&self.0) {
            return Ok(());
        }
        let (theirs, ours) = (self.0, wire::PROTOCOL);
        let words =
            format!("the running keeper uses version {theirs} of its protocol, and this program version {ours}");
        Err(io::Error::new(ErrorKind::InvalidData, words))
    }
}

#[derive(Debug)]
struct KeeperLink {
    socket: AsyncFd<OwnedFd>,
    pid: Pid,
    protocol: u32,
}

/// The state of one child; its socket belongs to a task.
#[derive(Debug)]
struct Link {
    serial: u64,
    /// Bounded by the requests of the caller: a monitor always reads.
    orders: UnboundedSender<LinkOrder>,
    /// `None` until the monitor is forked.
    monitor: Option<Pid>,
    stage: Stage,
    task: LinkTask,
    /// Only a monitor whose child has a lease is sure to know the messages about it.
    has_lease: bool,
}

/// The task that serves the socket of a monitor, or the socket while `ChildProcesses` is paused.
#[derive(Debug)]
enum LinkTask {
    Serving(JoinHandle<Option<Wire>>),
    /// It was asked for the socket.
    Pausing(JoinHandle<Option<Wire>>),
    Paused(Wire),
    /// The monitor has exited, or is about to be found gone.
    Over,
}

#[derive(Debug)]
enum Stage {
    Starting,
    Up { pid: u32 },
    Ended { is_sweep_asked: bool },
}

#[derive(Debug, Default)]
struct Lost {
    is_sweep_asked: bool,
    is_swept: bool,
}

/// Kills the orphans of monitors that are gone. No monitor or keeper is started during a sweep: it would look like an
/// orphan.
#[derive(Debug)]
struct Sweep {
    deadline: Instant,
    pause: Pause,
    step: SweepStep,
}

#[derive(Debug)]
enum SweepStep {
    Waiting(Pin<Box<Sleep>>),
    /// The result is the number of orphans that run.
    Looking(Task<usize>),
}

#[derive(Debug)]
enum LinkOrder {
    Send(Letter),
    /// Closes the write side of the socket: the monitor ends its child.
    Finish,
    /// The task ends, and returns the socket.
    Pause,
}

/// What the task of a link does next.
enum Step {
    Reported(MonitorReport),
    Paused,
    Dropped,
}

#[derive(Debug)]
enum MonitorReport {
    Word(Word),
    /// The monitor has exited.
    Gone,
    Swept,
}

#[derive(Debug)]
struct Letter {
    bytes: Vec<u8>,
    sent: usize,
    /// Sent with the first byte.
    fds: Vec<OwnedFd>,
}

impl ChildProcesses {
    /// Requests the start of a child and does not wait for it: [`News`] reports whether it started.
    pub fn spawn(&mut self, key: u64, order: &Order) -> io::Result<Pipes> {
        if order.live_until.is_some() {
            self.retire_older_keeper(wire::WITH_LEASES);
        }
        if self.keeper.is_none() && self.sweep.is_none() {
            self.keeper = Some(Keeper::replace().and_then(KeeperLink::new)?);
        }
        let bytes = wire::encode_spawn(key, order)?;
        let mut pipes = Pipes::default();
        let fds = match order.stdio {
            Stdio::Piped => {
                let (stdin, theirs) = pipe_to_child()?;
                let (stdout, output) = pipe_from_child()?;
                let (stderr, errors) = pipe_from_child()?;
                pipes = Pipes { stdin: Some(stdin), stdout: Some(stdout), stderr: Some(stderr), window: None };
                vec![theirs, output, errors]
            }
            Stdio::Inherit => [libc::STDIN_FILENO, libc::STDOUT_FILENO, libc::STDERR_FILENO]
                // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and outlast never
                // closes them.
                .map(|number| unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned())
                .into_iter()
                .collect::<io::Result<_>>()?,
            Stdio::Input => {
                let (stdin, theirs) = pipe_to_child()?;
                pipes.stdin = Some(stdin);
                let nowhere: OwnedFd = std::fs::OpenOptions::new().write(true).open("/dev/null")?.into();
                vec![theirs, nowhere.try_clone()?, nowhere]
            }
            Stdio::Build => {
                let (both, output) = pipe_from_child()?;
                pipes.stderr = Some(both);
                let errors = output.try_clone()?;
                vec![std::fs::File::open("/dev/null")?.into(), output, errors]
            }
            Stdio::Terminal(size) => {
                let pair = pty::open(size)?;
                pipes.stdin = Some(pair.sink);
                pipes.stdout = Some(pair.source);
                pipes.window = Some(pair.window);
                vec![pair.theirs.try_clone()?, pair.theirs.try_clone()?, pair.theirs]
            }
        };
        let (ours, theirs) = socket_pair()?;
        let (orders, ordered) = unbounded_channel();
        let wire =
            Wire { socket: register(ours)?, outbox: VecDeque::new(), inbox: Vec::new(), is_pausing: false, ordered };
        let serial = self.next_serial;
        self.next_serial += 1;
        let task = self.serve(wire, key, serial);
        let _ = orders.send(LinkOrder::Send(Letter { bytes, sent: 0, fds }));
        let has_lease = order.live_until.is_some();
        self.links.insert(key, Link { serial, orders, monitor: None, stage: Stage::Starting, task, has_lease });
        self.wanted.push_back(theirs);
        self.ask_for_monitors();
        Ok(pipes)
    }

    /// Signals the child's process group and its descendants outside of that group. No error if the child has exited.
    pub fn signal(&mut self, key: u64, signal: Signal) {
        self.post(key, wire::encode_signal(key, signal));
    }

    /// Moves the end of the lease of a child to a later moment. Changes nothing for a child without a lease, for a moment
    /// that is not later, and for a lease that has ended: its monitor has killed the child by then.
    pub fn extend(&mut self, key: u64, until: BootTime) {
        if self.links.get(&key).is_some_and(|link| link.has_lease) {
            self.post(key, wire::encode_extend(key, until));
        }
    }

    /// Kills all remaining descendants of an exited child, in its process group and outside of it; [`News::Swept`]
    /// follows. Each exited child must be swept: until then its process id is not reused.
    pub fn sweep(&mut self, key: u64) {
        if let Some(link) = self.links.get_mut(&key) {
            if let Stage::Ended { is_sweep_asked } = &mut link.stage {
                *is_sweep_asked = true;
            }
            return self.post(key, wire::encode_sweep(key));
        }
        match self.lost.get_mut(&key) {
            Some(lost) if !lost.is_swept => lost.is_sweep_asked = true,
            _ => {
                self.lost.remove(&key);
                let _ = self.tell.send((key, 0, MonitorReport::Swept));
            }
        }
    }

    /// The next event. Cancel-safe.
    pub fn poll_news(&mut self, cx: &mut Context<'_>) -> Poll<News> {
        loop {
            if let Some(news) = self.ready.pop_front() {
                return Poll::Ready(news);
            }
            let mut moved = self.poll_keeper(cx);
            if self.child_signals.poll_recv(cx).is_ready() || std::mem::take(&mut self.is_first_look) {
                self.look_after_processes();
                moved = true;
            }
            if let Poll::Ready(Some((key, serial, heard))) = self.heard.poll_recv(cx) {
                self.hear(key, serial, heard);
                moved = true;
            }
            moved |= self.poll_sweep(cx);
            if !moved && self.ready.is_empty() {
                return Poll::Pending;
            }
        }
    }

    /// Ends every child, and waits for the monitors and the keeper to exit, for a bounded time.
    pub async fn close(mut self) {
        self.is_closing = true;
        self.wanted.clear();
        // A monitor reads an end of file, as it would if outlast had been killed.
        for link in self.links.values() {
            let _ = link.orders.send(LinkOrder::Finish);
        }
        let keeper = self.keeper_pid();
        let gone = poll_fn(|cx| {
            loop {
                let news = self.poll_news(cx);
                if self.links.is_empty() && self.sweep.is_none() {
                    let Some(keeper) = &self.keeper else { return Poll::Ready(()) };
                    let _ = shutdown(keeper.socket.as_raw_fd(), Shutdown::Write);
                }
                if news.is_pending() {
                    return Poll::Pending;
                }
            }
        });
        if tokio::time::timeout(CLOSE_MAX, gone).await.is_ok()
            && let Some(keeper) = keeper
        {
            // The keeper closed its socket by exiting, so this does not block.
            while waitpid(keeper, None) == Err(Errno::EINTR) {}
        }
    }

    /// Whether it cannot be handed over now: a process is being started or swept, or a report is not delivered yet.
    pub fn is_busy(&self) -> bool {
        let is_starting = |link: &Link| link.monitor.is_none() || matches!(link.stage, Stage::Starting);
        let is_waiting = !self.wanted.is_empty() || !self.ready.is_empty() || !self.heard.is_empty();
        let is_sweeping = !self.lost.is_empty() || self.sweep.is_some();
        self.keeper.is_none() || is_waiting || is_sweeping || self.links.values().any(is_starting)
    }

    /// Stops serving the monitors, so that [`ChildProcesses::save`] finds all that they have sent. Ready when that is done;
    /// then either the process becomes another program, or [`ChildProcesses::resume`] follows.
    pub fn poll_pause(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut is_paused = true;
        for link in self.links.values_mut() {
            let mut task = match std::mem::replace(&mut link.task, LinkTask::Over) {
                LinkTask::Serving(task) => {
                    // A task that has ended already does not get it.
                    let _ = link.orders.send(LinkOrder::Pause);
                    task
                }
                LinkTask::Pausing(task) => task,
                task => {
                    link.task = task;
                    continue;
                }
            };
            link.task = match Pin::new(&mut task).poll(cx) {
                Poll::Ready(Ok(Some(wire))) => LinkTask::Paused(wire),
                Poll::Ready(_) => LinkTask::Over,
                Poll::Pending => {
                    is_paused = false;
                    LinkTask::Pausing(task)
                }
            };
        }
        if is_paused { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Serves the monitors again.
    pub fn resume(&mut self) {
        let tell = self.tell.clone();
        for (key, link) in &mut self.links {
            link.task = match std::mem::replace(&mut link.task, LinkTask::Over) {
                LinkTask::Paused(wire) => LinkTask::Serving(tokio::spawn(wire.serve(*key, link.serial, tell.clone()))),
                task => task,
            };
        }
    }

    /// The state of paused `ChildProcesses`. `None` if it cannot be handed over now.
    pub fn save(&self, handover: &mut Handover) -> Option<SavedChildProcesses> {
        let keeper = self.keeper.as_ref().filter(|_| !self.is_busy())?;
        let mut links = Vec::new();
        for (key, link) in &self.links {
            let LinkTask::Paused(wire) = &link.task else { return None };
            if !wire.outbox.is_empty() || !wire.ordered.is_empty() {
                return None;
            }
            let (pid, is_sweep_asked) = match link.stage {
                Stage::Starting => return None,
                Stage::Up { pid } => (Some(pid), false),
                Stage::Ended { is_sweep_asked } => (None, is_sweep_asked),
            };
            links.push(SavedLink {
                key: *key,
                socket: handover.keep(wire.socket.get_ref().as_fd()),
                monitor: link.monitor?.as_raw(),
                pid,
                is_sweep_asked,
                inbox: wire.inbox.clone(),
                has_lease: link.has_lease,
            });
        }
        Some(SavedChildProcesses {
            keeper: SavedKeeper { socket: handover.keep(keeper.socket.get_ref().as_fd()), pid: keeper.pid.as_raw() },
            others: self.others.iter().map(|pid| pid.as_raw()).collect(),
            inherited: INHERITED.get_or_init(Inherited::now).save(),
            links,
        })
    }

    fn serve(&self, wire: Wire, key: u64, serial: u64) -> LinkTask {
        LinkTask::Serving(tokio::spawn(wire.serve(key, serial, self.tell.clone())))
    }

    /// The version of the messages that its processes know, for the program that takes them over.
    pub fn protocol(&self) -> KeeperProtocol {
        KeeperProtocol(self.keeper.as_ref().map_or(wire::PROTOCOL, |keeper| keeper.protocol))
    }

    /// Kills a keeper of an older program, whose monitors would not understand a request. The monitors that it has
    /// forked continue, as after any end of a keeper; a new one is started with the next child.
    fn retire_older_keeper(&mut self, version: u32) {
        if let Some(keeper) = self.keeper.take_if(|keeper| keeper.protocol < version) {
            // Not if it was reaped before its end was noticed: the number may be that of another process.
            if waitpid(keeper.pid, Some(WaitPidFlag::WNOHANG)) == Ok(WaitStatus::StillAlive) {
                let _ = kill(keeper.pid, Number::SIGKILL);
            }
        }
    }

    fn keeper_pid(&self) -> Option<Pid> {
        self.keeper.as_ref().map(|keeper| keeper.pid)
    }

    fn post(&mut self, key: u64, bytes: Vec<u8>) {
        if let Some(link) = self.links.get(&key) {
            let _ = link.orders.send(LinkOrder::Send(Letter { bytes, sent: 0, fds: Vec::new() }));
        }
    }

    fn hear(&mut self, key: u64, serial: u64, heard: MonitorReport) {
        if let MonitorReport::Swept = heard {
            return self.ready.push_back(News::Swept { key });
        }
        let Some(link) = self.links.get_mut(&key).filter(|link| link.serial == serial) else { return };
        match heard {
            MonitorReport::Word(Word::Monitor(pid)) => link.monitor = Some(Pid::from_raw(pid)),
            MonitorReport::Word(Word::News(news)) => {
                match &news {
                    News::Started { pid, .. } => link.stage = Stage::Up { pid: *pid },
                    News::Exited { .. } => link.stage = Stage::Ended { is_sweep_asked: false },
                    News::StartFailed { .. } | News::Swept { .. } => drop(self.links.remove(&key)),
                    News::Stopped { .. } | News::LeaseEnded { .. } | News::Noticed(_) => {}
                }
                self.ready.push_back(match news {
                    // The keeper reports a failed fork in place of a monitor, and does not know the key.
                    News::StartFailed { error, .. } => News::StartFailed { key, error },
                    news => news,
                });
            }
            MonitorReport::Gone => {
                if let Some(link) = self.links.remove(&key)
                    && !self.is_closing
                {
                    self.monitor_lost(key, &link);
                }
            }
            MonitorReport::Swept => {}
        }
    }

    /// The kernel has killed the child together with its monitor. The other descendants are killed here.
    fn monitor_lost(&mut self, key: u64, link: &Link) {
        match link.stage {
            Stage::Starting => {
                let error = io::Error::other("its monitor process ended before the program was started");
                self.ready.push_back(News::StartFailed { key, error });
            }
            Stage::Up { pid } => {
                // Only Linux sends a signal at the end of the parent.
                #[cfg(not(target_os = "linux"))]
                let _ = nix::sys::signal::killpg(Pid::from_raw(pid as i32), Number::SIGKILL);
                let words = format!(
                    "the monitor of process {pid} was killed or stopped; the process and its children are ended"
                );
                self.ready.push_back(News::Noticed(words));
                self.ready.push_back(News::Exited { key, exit: Exit::Signal(libc::SIGKILL) });
                self.lost.insert(key, Lost::default());
            }
            Stage::Ended { is_sweep_asked } => {
                self.lost.insert(key, Lost { is_sweep_asked, is_swept: false });
            }
        }
        let step = SweepStep::Waiting(Box::pin(sleep(Duration::ZERO)));
        self.sweep = Some(Sweep { deadline: Instant::now() + SWEEP_MAX, pause: Pause::default(), step });
    }

    /// Advances the sweep. True if it has finished.
    fn poll_sweep(&mut self, cx: &mut Context<'_>) -> bool {
        while let Some(sweep) = &mut self.sweep {
            let is_late = sweep.deadline <= Instant::now();
            let alive = match &mut sweep.step {
                SweepStep::Waiting(timer) => {
                    if timer.as_mut().poll(cx).is_pending() {
                        return false;
                    }
                    // A new monitor soon reports its process id. Until then it looks like an orphan.
                    let is_forking =
                        self.links.values().filter(|link| link.monitor.is_none()).count() > self.wanted.len();
                    if is_forking && !is_late {
                        sweep.step = SweepStep::Waiting(Box::pin(sleep(sweep.pause.next())));
                        continue;
                    }
                    let (roots, left_alone) = self.processes();
                    let look = move || descendants::kill_unmonitored(&roots, &left_alone);
                    if let Some(sweep) = &mut self.sweep {
                        sweep.step = SweepStep::Looking(offload(look));
                    }
                    continue;
                }
                SweepStep::Looking(task) => match Pin::new(task).poll(cx) {
                    Poll::Pending => return false,
                    Poll::Ready(Ok(alive)) => alive,
                    // If no thread can be started, this thread does the work: it takes a few milliseconds.
                    Poll::Ready(Err(_)) => {
                        let (roots, left_alone) = self.processes();
                        descendants::kill_unmonitored(&roots, &left_alone)
                    }
                },
            };
            if let Some(sweep) = self.sweep.as_mut().filter(|_| 0 < alive && !is_late) {
                sweep.step = SweepStep::Waiting(Box::pin(sleep(sweep.pause.next())));
                continue;
            }
            self.sweep = None;
            for (key, lost) in &mut self.lost {
                lost.is_swept = true;
                if lost.is_sweep_asked {
                    self.ready.push_back(News::Swept { key: *key });
                }
            }
            self.lost.retain(|_, lost| !lost.is_sweep_asked);
            if self.keeper.is_none() && !self.is_closing {
                self.replace_keeper();
            }
            self.ask_for_monitors();
            return true;
        }
        false
    }

    /// The processes that orphans are reparented to, and the processes that are not orphans.
    fn processes(&self) -> (Vec<Pid>, Vec<Pid>) {
        let roots = [Some(getpid()), self.keeper_pid()].into_iter().flatten().collect();
        let left_alone =
            self.links.values().filter_map(|link| link.monitor).chain(self.others.iter().copied()).collect();
        (roots, left_alone)
    }

    fn ask_for_monitors(&mut self) {
        let Some(keeper) = self.keeper.as_ref().filter(|_| self.sweep.is_none()) else { return };
        while let Some(socket) = self.wanted.front() {
            match keeper.send(socket) {
                Ok(()) => drop(self.wanted.pop_front()),
                // A busy keeper is asked again when its socket is writable; the exit of a keeper is noticed soon.
                Err(_) => return,
            }
        }
    }

    /// Sends the remaining sockets, and checks the keeper. True if it has exited.
    fn poll_keeper(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(keeper) = &self.keeper else { return false };
        while self.sweep.is_none() && !self.wanted.is_empty() {
            let Poll::Ready(Ok(mut readiness)) = keeper.socket.poll_write_ready(cx) else { break };
            match self.wanted.front().map(|socket| keeper.send(socket)) {
                Some(Ok(())) => drop(self.wanted.pop_front()),
                Some(Err(error)) if error.kind() == ErrorKind::WouldBlock => readiness.clear_ready(),
                _ => break,
            }
        }
        loop {
            let Poll::Ready(readiness) = keeper.socket.poll_read_ready(cx) else { return false };
            let mut space = [0];
            match (readiness, nix::unistd::read(keeper.socket.get_ref(), &mut space)) {
                (Ok(mut readiness), Err(Errno::EAGAIN)) => readiness.clear_ready(),
                (Ok(_), Err(Errno::EINTR)) => {}
                // The keeper never writes, so this is its end.
                _ => break,
            }
        }
        self.keeper = None;
        self.kill_stopped_monitors();
        if !self.is_closing && self.sweep.is_none() {
            self.replace_keeper();
        }
        true
    }

    fn replace_keeper(&mut self) {
        let is_too_soon = self.replaced_at.is_some_and(|then| then.elapsed() < KEEPER_PAUSE);
        if is_too_soon {
            // The sockets close, so these starts fail and are retried.
            self.wanted.clear();
            let words = "the keeper process was killed or stopped again; a new one is started with the next child";
            return self.ready.push_back(News::Noticed(words.to_owned()));
        }
        self.replaced_at = Some(Instant::now());
        let words = match Keeper::replace().and_then(KeeperLink::new) {
            Ok(keeper) => {
                self.keeper = Some(keeper);
                self.ask_for_monitors();
                "the keeper process was killed or stopped; a new one was started".to_owned()
            }
            Err(error) => {
                self.wanted.clear();
                let why = cause::plain(&error.to_string());
                format!("the keeper process was killed or stopped, and a new one cannot be started now: {why}")
            }
        };
        self.ready.push_back(News::Noticed(words));
    }

    /// Reaps exited processes, and kills a keeper or monitor that was stopped: its socket closes, which starts the
    /// recovery.
    fn look_after_processes(&mut self) {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
                Ok(WaitStatus::Stopped(pid, _)) => {
                    let is_monitor = self.links.values().any(|link| link.monitor == Some(pid));
                    if is_monitor || self.keeper_pid() == Some(pid) {
                        let _ = kill(pid, Number::SIGKILL);
                    }
                }
                Ok(WaitStatus::StillAlive) => return,
                // If it was a keeper, its monitors have been reparented to outlast.
                Ok(_) => self.kill_stopped_monitors(),
                Err(Errno::EINTR) => {}
                Err(_) => return,
            }
        }
    }

    /// Kills monitors that stopped while no parent was there to notice it. A monitor that has a link is not reaped
    /// yet.
    fn kill_stopped_monitors(&self) {
        for pid in self.links.values().filter_map(|link| link.monitor) {
            if is_stopped(pid) {
                let _ = kill(pid, Number::SIGKILL);
            }
        }
    }
}

impl Drop for ChildProcesses {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper_pid() {
            let _ = waitpid(keeper, Some(WaitPidFlag::WNOHANG));
        }
    }
}

impl KeeperLink {
    fn new(keeper: Keeper) -> io::Result<KeeperLink> {
        Ok(KeeperLink { socket: register(keeper.socket)?, pid: keeper.pid, protocol: keeper.protocol })
    }

    /// Requests a monitor with this socket.
    fn send(&self, socket: &OwnedFd) -> io::Result<()> {
        let fds = [socket.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&fds)];
        loop {
            match sendmsg::<()>(self.socket.as_raw_fd(), &[IoSlice::new(b"m")], &rights, MsgFlags::empty(), None) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The socket to one monitor, owned by a task.
#[derive(Debug)]
struct Wire {
    socket: AsyncFd<OwnedFd>,
    ordered: UnboundedReceiver<LinkOrder>,
    outbox: VecDeque<Letter>,
    inbox: Vec<u8>,
    /// `ChildProcesses` wants the socket back.
    is_pausing: bool,
}

impl Wire {
    /// Runs until the monitor exits, its link is dropped, or `ChildProcesses` is paused, which gets the socket back.
    async fn serve(mut self, key: u64, serial: u64, tell: UnboundedSender<(u64, u64, MonitorReport)>) -> Option<Wire> {
        loop {
            match poll_fn(|cx| self.poll_step(cx)).await {
                Step::Reported(heard) => {
                    let is_gone = matches!(heard, MonitorReport::Gone);
                    if tell.send((key, serial, heard)).is_err() || is_gone {
                        return None;
                    }
                }
                Step::Paused => return Some(self),
                Step::Dropped => return None,
            }
        }
    }

    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<Step> {
        while let Poll::Ready(order) = self.ordered.poll_recv(cx) {
            match order {
                Some(LinkOrder::Send(letter)) => self.outbox.push_back(letter),
                Some(LinkOrder::Finish) => drop(shutdown(self.socket.as_raw_fd(), Shutdown::Write)),
                Some(LinkOrder::Pause) => self.is_pausing = true,
                None => return Poll::Ready(Step::Dropped),
            }
        }
        match self.poll_word(cx) {
            Poll::Ready(Ok(word)) => Poll::Ready(Step::Reported(MonitorReport::Word(word))),
            Poll::Ready(Err(_)) => Poll::Ready(Step::Reported(MonitorReport::Gone)),
            // What was ordered before is sent first.
            Poll::Pending if self.is_pausing && self.outbox.is_empty() => {
                self.is_pausing = false;
                Poll::Ready(Step::Paused)
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// An error means that the monitor has exited.
    fn poll_word(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Word>> {
        loop {
            if let Some(word) = wire::take_word(&mut self.inbox)? {
                return Poll::Ready(Ok(word));
            }
            while !self.outbox.is_empty() {
                let Poll::Ready(readiness) = self.socket.poll_write_ready(cx) else { break };
                let mut readiness = readiness?;
                match send_next(self.socket.get_ref(), &mut self.outbox) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => readiness.clear_ready(),
                    // The messages that the monitor sent before it exited are still to be read.
                    Err(_) => self.outbox.clear(),
                    Ok(()) => {}
                }
            }
            let mut readiness = ready!(self.socket.poll_read_ready(cx))?;
            let mut space = [0; READ_MAX];
            match nix::unistd::read(self.socket.get_ref(), &mut space) {
                Ok(0) => return Poll::Ready(Err(ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    self.inbox.extend_from_slice(&space[..count]);
                    if count < space.len() {
                        readiness.clear_ready();
                    }
                }
                Err(Errno::EAGAIN) => readiness.clear_ready(),
                Err(Errno::EINTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}

fn register(socket: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    set_nonblocking(&socket)?;
    // SAFETY: an owned descriptor is not changed, and stays open until its owner is dropped.
    unsafe { AsyncFd::register(socket) }.map_err(|error| error.into_parts().1)
}

/// The children of this process, where the system lists them without a scan of all processes.
fn children() -> Vec<Pid> {
    let listed = std::fs::read_to_string(format!("/proc/self/task/{}/children", getpid())).unwrap_or_default();
    listed.split_ascii_whitespace().filter_map(|pid| Some(Pid::from_raw(pid.parse().ok()?))).collect()
}

#[cfg(target_os = "linux")]
fn is_stopped(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name is in parentheses and may itself contain blanks and parentheses.
    stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with(['T', 't']))
}

#[cfg(not(target_os = "linux"))]
fn is_stopped(_pid: Pid) -> bool {
    false
}

/// Sends as much of the first letter as the kernel accepts.
fn send_next(socket: &OwnedFd, outbox: &mut VecDeque<Letter>) -> io::Result<()> {
    let Some(letter) = outbox.front_mut() else { return Ok(()) };
    let fds: Vec<RawFd> = letter.fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let control: &[_] = if fds.is_empty() { &[] } else { &rights };
    let rest = [IoSlice::new(&letter.bytes[letter.sent..])];
    match sendmsg::<()>(socket.as_fd().as_raw_fd(), &rest, control, MsgFlags::empty(), None) {
        Ok(count) => {
            letter.fds.clear();
            letter.sent += count;
        }
        Err(Errno::EINTR) => {}
        Err(error) => return Err(error.into()),
    }
    if letter.sent == letter.bytes.len() {
        outbox.pop_front();
    }
    Ok(())
}

fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    #[cfg(target_os = "linux")]
    return Ok(socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?);
    #[cfg(not(target_os = "linux"))]
    {
        use nix::fcntl::{FcntlArg, FdFlag, fcntl};
        let pair = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::empty())?;
        for end in [&pair.0, &pair.1] {
            fcntl(end, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        }
        Ok(pair)
    }
}
