//! Our side of keeper and monitors: orders out, news in; and what is done when one of them is killed or stopped.
//!
//! Each child has a monitor with a socket of its own, served by a task. A keeper that ends is replaced by running this
//! program again; the monitors it has forked go on. Where a monitor ends, outlast kills what it has left: those processes
//! come to the keeper or, if that is gone as well, to outlast, which is a subreaper, too (Linux).
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
use tokio::{
    io::unix::AsyncFd,
    signal::unix::{Signal as SignalStream, SignalKind, signal},
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::{Sleep, sleep},
};

use super::{
    descendants, keeper,
    monitor::{Pause, SWEEP_MAX},
    pty,
    stops::is_ignored,
    stream::{pipe_from_child, pipe_to_child, set_nonblocking},
    wire::{self, Word},
};
use crate::{
    offload::{Task, offload},
    os::{Exit, News, Order, Pipes, Signal, Stdio},
    report,
};

/// How long [`Household::close`] waits for the monitors and the keeper, which take a second at most unless a process
/// cannot even be killed; then they stay behind to see to that.
const CLOSE_MAX: Duration = Duration::from_secs(3);

/// A keeper that ends sooner than this after it replaced another one is replaced at the next start of a child, not at once:
/// a child that kills each keeper must not keep the loop busy.
const KEEPER_PAUSE: Duration = Duration::from_secs(1);

/// How much news is read at once.
const READ_MAX: usize = 4096;

/// The first word of the command line of a keeper that replaces another one. There are no further words.
const KEEPER_NAME: &str = "outlast-keeper";

/// What children inherit by way of the keeper, as it was when outlast started: outlast changes both for itself.
struct Inherited {
    descriptors: Option<(u64, u64)>,
    ignored: Vec<libc::c_int>,
}

static INHERITED: OnceLock<Inherited> = OnceLock::new();

impl Inherited {
    fn now() -> Inherited {
        let ignored = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP].into_iter().filter(|signal| is_ignored(*signal));
        Inherited { descriptors: getrlimit(Resource::RLIMIT_NOFILE).ok(), ignored: ignored.collect() }
    }

    /// Between fork and exec: makes system calls only.
    fn restore(&self) -> io::Result<()> {
        if let Some((soft, hard)) = self.descriptors {
            setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
        }
        for signal in &self.ignored {
            // SAFETY: only says that the signal is to be ignored.
            unsafe { libc::signal(*signal, libc::SIG_IGN) };
        }
        Ok(())
    }
}

/// The keeper process, before there is a runtime.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
    pid: Pid,
    /// Children that this process had before, from the program that became outlast.
    others: Vec<Pid>,
}

impl Keeper {
    /// Forks the keeper. It stays until the [`Household`] it serves is gone, and ends what is left then.
    ///
    /// Must come before any thread: a forked process has only the thread that forked, and would wait for
    /// ever for whatever lock another one held. On Linux a second thread is an error here.
    pub fn begin() -> io::Result<Keeper> {
        #[cfg(target_os = "linux")]
        if 1 < std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count) {
            return Err(io::Error::other("the keeper must be forked before any thread exists"));
        }
        INHERITED.get_or_init(Inherited::now);
        let others = children();
        #[cfg(target_os = "linux")]
        // SAFETY: only sets a property of this process: what a killed keeper and monitor leave comes to us.
        unsafe {
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        }
        let (ours, keepers) = socket_pair()?;
        // SAFETY: there is no other thread (see above), so the new process finds every lock free, and it
        // never returns from the block below.
        match unsafe { fork() }? {
            ForkResult::Child => {
                drop(ours);
                keeper::main(keepers)
            }
            ForkResult::Parent { child } => Ok(Keeper { socket: ours, pid: child, others }),
        }
    }

    /// Runs this program again, as a keeper: outlast has threads by now, so that it cannot fork one.
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
        Ok(Keeper { socket: ours, pid: Pid::from_raw(pid as i32), others: Vec::new() })
    }

    /// Becomes a keeper and does not return, if that is what this process was started for.
    pub fn become_one_if_asked(args: &[OsString]) {
        let [name] = args else { return };
        if name != KEEPER_NAME {
            return;
        }
        // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and we never close them.
        let stdin = unsafe { BorrowedFd::borrow_raw(libc::STDIN_FILENO) };
        match stdin.try_clone_to_owned() {
            Ok(socket) => keeper::main(socket),
            Err(_) => std::process::exit(1),
        }
    }

    /// Joins the runtime we are in.
    pub fn attach(self) -> io::Result<Household> {
        let (tell, heard) = unbounded_channel();
        let others = self.others.clone();
        Ok(Household {
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

/// All our children, by key. Dropping it ends them.
#[derive(Debug)]
pub struct Household {
    /// None if it could not be replaced, or ended too soon; the next spawn starts one.
    keeper: Option<KeeperLink>,
    replaced_at: Option<Instant>,
    /// Sockets for monitors that the keeper has yet to fork.
    wanted: VecDeque<OwnedFd>,
    links: BTreeMap<u64, Link>,
    /// Keys may be used again while the task of an earlier link still ends.
    next_serial: u64,
    tell: UnboundedSender<(u64, u64, Heard)>,
    /// Bounded by what monitors have to say of one child: a handful of words each.
    heard: UnboundedReceiver<(u64, u64, Heard)>,
    /// SIGCHLD: the keeper, or a monitor whose keeper is gone, has ended or stopped.
    child_signals: SignalStream,
    /// Children whose monitor is gone, by key, until they are swept and the caller knows.
    lost: BTreeMap<u64, Lost>,
    sweep: Option<Sweep>,
    others: Vec<Pid>,
    ready: VecDeque<News>,
    is_closing: bool,
    /// A signal that came before we listened is not heard.
    is_first_look: bool,
}

#[derive(Debug)]
struct KeeperLink {
    socket: AsyncFd<OwnedFd>,
    pid: Pid,
}

/// What is known of one child here; its socket belongs to a task.
#[derive(Debug)]
struct Link {
    serial: u64,
    /// Bounded by what the caller asks for: a monitor always reads.
    orders: UnboundedSender<LinkOrder>,
    /// None until it is forked.
    monitor: Option<Pid>,
    stage: Stage,
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

/// Kills what monitors have left that are gone. No monitor or keeper is started meanwhile: it could not be told from an
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
    /// How many were alive.
    Looking(Task<usize>),
}

#[derive(Debug)]
enum LinkOrder {
    Send(Letter),
    /// Nothing more will be sent: the monitor ends its child.
    Finish,
}

#[derive(Debug)]
enum Heard {
    Word(Word),
    /// The monitor is gone.
    Gone,
    Swept,
}

#[derive(Debug)]
struct Letter {
    bytes: Vec<u8>,
    sent: usize,
    /// They leave with the first byte.
    fds: Vec<OwnedFd>,
}

impl Household {
    /// Orders a child. Never waits for it: whether it could be started is news.
    pub fn spawn(&mut self, key: u64, order: &Order) -> io::Result<Pipes> {
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
                // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and we never
                // close them.
                .map(|number| unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned())
                .into_iter()
                .collect::<io::Result<_>>()?,
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
        let wire = Wire { socket: register(ours)?, outbox: VecDeque::new(), inbox: Vec::new(), ordered };
        let serial = self.next_serial;
        self.next_serial += 1;
        tokio::spawn(wire.serve(key, serial, self.tell.clone()));
        let _ = orders.send(LinkOrder::Send(Letter { bytes, sent: 0, fds }));
        self.links.insert(key, Link { serial, orders, monitor: None, stage: Stage::Starting });
        self.wanted.push_back(theirs);
        self.ask_for_monitors();
        Ok(pipes)
    }

    /// Signals the child's group and what left it. Already gone is fine.
    pub fn signal(&mut self, key: u64, signal: Signal) {
        self.post(key, wire::encode_signal(key, signal));
    }

    /// Kills whatever an ended child has left, in its group or out of it; [`News::Swept`] follows. Each
    /// child that has exited is to be swept: until then its process id is kept from being used again.
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
                let _ = self.tell.send((key, 0, Heard::Swept));
            }
        }
    }

    /// The next piece of news. Cancel-safe.
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

    /// Ends every child and waits for monitors and keeper to be done, a bounded time.
    pub async fn close(mut self) {
        self.is_closing = true;
        self.wanted.clear();
        // A monitor reads an end of file, as it would if we had been killed.
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
            // Its end of the socket closed as it exited, so this takes no time.
            while waitpid(keeper, None) == Err(Errno::EINTR) {}
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

    fn hear(&mut self, key: u64, serial: u64, heard: Heard) {
        if let Heard::Swept = heard {
            return self.ready.push_back(News::Swept { key });
        }
        let Some(link) = self.links.get_mut(&key).filter(|link| link.serial == serial) else { return };
        match heard {
            Heard::Word(Word::Monitor(pid)) => link.monitor = Some(Pid::from_raw(pid)),
            Heard::Word(Word::News(news)) => {
                match &news {
                    News::Started { pid, .. } => link.stage = Stage::Up { pid: *pid },
                    News::Exited { .. } => link.stage = Stage::Ended { is_sweep_asked: false },
                    News::StartFailed { .. } | News::Swept { .. } => drop(self.links.remove(&key)),
                    News::Stopped { .. } | News::Noticed(_) | News::KeeperLost => {}
                }
                self.ready.push_back(match news {
                    // The keeper, which may say this in a monitor's place, does not know the key.
                    News::StartFailed { error, .. } => News::StartFailed { key, error },
                    news => news,
                });
            }
            Heard::Gone => {
                if let Some(link) = self.links.remove(&key)
                    && !self.is_closing
                {
                    self.monitor_lost(key, &link);
                }
            }
            Heard::Swept => {}
        }
    }

    /// The kernel has killed the child with its monitor. The rest is killed here.
    fn monitor_lost(&mut self, key: u64, link: &Link) {
        match link.stage {
            Stage::Starting => {
                let error = io::Error::other("its monitor process ended before the program was started");
                self.ready.push_back(News::StartFailed { key, error });
            }
            Stage::Up { pid } => {
                // Elsewhere no signal comes with the end of a parent.
                #[cfg(not(target_os = "linux"))]
                let _ = nix::sys::signal::killpg(Pid::from_raw(pid as i32), Number::SIGKILL);
                let words = format!("the monitor of process {pid} was killed or stopped; what it watched is ended");
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

    /// Takes a sweep further. True if it came to its end.
    fn poll_sweep(&mut self, cx: &mut Context<'_>) -> bool {
        while let Some(sweep) = &mut self.sweep {
            let is_late = sweep.deadline <= Instant::now();
            let alive = match &mut sweep.step {
                SweepStep::Waiting(timer) => {
                    if timer.as_mut().poll(cx).is_pending() {
                        return false;
                    }
                    // A monitor that was just forked says soon who it is. Until then it could be taken for an orphan.
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
                    // Without a thread it is done here: it takes a few milliseconds.
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

    /// The processes that orphans come to, and those that are no orphans.
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
                // A keeper that is busy is asked again when there is room; one that is gone shows soon.
                Err(_) => return,
            }
        }
    }

    /// Sends what is left to send, and sees whether the keeper is there. True if it is not.
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
                // It never says anything.
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
            // Their sockets close, so that these starts fail, and are tried again.
            self.wanted.clear();
            let words = "the keeper process was killed or stopped again; a new one is started when it is needed";
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
                let why = report::plain(&error.to_string());
                format!("the keeper process was killed or stopped, and a new one cannot be started now: {why}")
            }
        };
        self.ready.push_back(News::Noticed(words));
    }

    /// Reaps what has ended, and kills a keeper or monitor that was stopped: its socket closes, and the rest follows.
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
                // If it was a keeper, its monitors have come to us.
                Ok(_) => self.kill_stopped_monitors(),
                Err(Errno::EINTR) => {}
                Err(_) => return,
            }
        }
    }

    /// Monitors that stopped while no process was there to notice it. Those that have a link are not reaped yet.
    fn kill_stopped_monitors(&self) {
        for pid in self.links.values().filter_map(|link| link.monitor) {
            if is_stopped(pid) {
                let _ = kill(pid, Number::SIGKILL);
            }
        }
    }
}

impl Drop for Household {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper_pid() {
            let _ = waitpid(keeper, Some(WaitPidFlag::WNOHANG));
        }
    }
}

impl KeeperLink {
    fn new(keeper: Keeper) -> io::Result<KeeperLink> {
        Ok(KeeperLink { socket: register(keeper.socket)?, pid: keeper.pid })
    }

    /// Asks for a monitor with this socket.
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

/// The task of one link.
struct Wire {
    socket: AsyncFd<OwnedFd>,
    ordered: UnboundedReceiver<LinkOrder>,
    outbox: VecDeque<Letter>,
    inbox: Vec<u8>,
}

impl Wire {
    /// Until the monitor is gone, or its link is.
    async fn serve(mut self, key: u64, serial: u64, tell: UnboundedSender<(u64, u64, Heard)>) {
        while let Some(heard) = poll_fn(|cx| self.poll_heard(cx)).await {
            let is_gone = matches!(heard, Heard::Gone);
            if tell.send((key, serial, heard)).is_err() || is_gone {
                return;
            }
        }
    }

    fn poll_heard(&mut self, cx: &mut Context<'_>) -> Poll<Option<Heard>> {
        while let Poll::Ready(order) = self.ordered.poll_recv(cx) {
            match order {
                Some(LinkOrder::Send(letter)) => self.outbox.push_back(letter),
                Some(LinkOrder::Finish) => drop(shutdown(self.socket.as_raw_fd(), Shutdown::Write)),
                None => return Poll::Ready(None),
            }
        }
        Poll::Ready(Some(match ready!(self.poll_word(cx)) {
            Ok(word) => Heard::Word(word),
            Err(_) => Heard::Gone,
        }))
    }

    /// An error means that the monitor is gone.
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
                    // What the monitor said before it went is still to be read.
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
    // SAFETY: an owned descriptor stays the same, and open, for as long as its owner is.
    unsafe { AsyncFd::register(socket) }.map_err(|error| error.into_parts().1)
}

/// The children this process has, where the system tells without a look at all processes.
fn children() -> Vec<Pid> {
    let listed = std::fs::read_to_string(format!("/proc/self/task/{}/children", getpid())).unwrap_or_default();
    listed.split_ascii_whitespace().filter_map(|pid| Some(Pid::from_raw(pid.parse().ok()?))).collect()
}

#[cfg(target_os = "linux")]
fn is_stopped(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in brackets may itself hold blanks and brackets.
    stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with(['T', 't']))
}

#[cfg(not(target_os = "linux"))]
fn is_stopped(_pid: Pid) -> bool {
    false
}

/// Sends what the kernel takes of the first letter, which there is.
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
