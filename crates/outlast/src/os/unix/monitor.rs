//! A monitor: the parent of one child, and the subreaper of all that the child starts, so that it finds them wherever they
//! went and whatever they did to their environment. It outlives outlast by just as long as it takes to end them.
//!
//! It sits in a session of its own, so that neither a terminal nor a client's `killpg` reaches it, and has one thread, one
//! loop and no runtime. It learns that outlast is gone from the end of its socket, however outlast ended. If the monitor
//! itself is killed, the kernel kills its child, and outlast kills the rest (`household.rs`).
//!
//! A child that has ended stays a zombie until it is swept. Its number, which is also that of its group, can therefore not
//! be given to another process while it may still be signalled.
#![expect(
    unsafe_code,
    reason = "signal handlers, wait without reaping, descriptors from a socket, `pre_exec`, `_exit`"
)]

use std::{
    collections::VecDeque,
    env,
    ffi::OsStr,
    fs::{self, File},
    io::{self, ErrorKind, IoSliceMut, Read},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
        unix::process::CommandExt,
    },
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicI32, Ordering},
    time::{Duration, Instant},
};

use nix::{
    cmsg_space,
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{Signal as Number, killpg},
        socket::{ControlMessageOwned, MsgFlags, recvmsg},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout, read, setsid, write},
};

use super::{
    descendants,
    memory::give_back_code,
    sandbox,
    stops::is_ignored,
    stream::{pipe, set_nonblocking},
    wire::{self, Request},
};
use crate::os::{CHILD_TAG, Exit, News, Order, Signal, Stdio};

/// How long the children may take to end by themselves once we are gone.
pub(super) const GRACE: Duration = Duration::from_secs(1);

/// A sweep is called done after this even if something it killed does not go, as may happen to a
/// process in the middle of a disk access: it can do nothing any more, and we do not stay for it.
pub(super) const SWEEP_MAX: Duration = Duration::from_secs(1);

/// Pauses between two looks at what was killed, if nothing wakes us before.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// The monitor's whole run.
pub(super) fn main(socket: OwnedFd) -> ! {
    // A panic must not unwind into the program we were forked from. Children die with us (see `command`).
    let code = match catch_unwind(AssertUnwindSafe(|| Monitor::begin(socket).map(Monitor::keep))) {
        Ok(Ok(())) => 0,
        Ok(Err(_)) | Err(_) => 1,
    };
    // SAFETY: ends the process at once; the buffers of the program we were forked from are not ours to flush.
    unsafe { libc::_exit(code) }
}

struct Monitor {
    socket: OwnedFd,
    /// Readable after a SIGCHLD.
    wakes: OwnedFd,
    inbox: Vec<u8>,
    /// Descriptors that came with the bytes of the inbox, in the order of its frames.
    fds: VecDeque<OwnedFd>,
    outbox: Vec<u8>,
    /// At most one: outlast orders one child from each monitor.
    children: Vec<Child>,
    /// Something was spawned, and the code for that may be given back.
    has_spawned: bool,
}

/// A process we started and have not reaped.
struct Child {
    key: u64,
    pid: Pid,
    has_terminal: bool,
    has_ended: bool,
    sweep: Option<Sweep>,
}

struct Sweep {
    deadline: Instant,
    next: Instant,
    pause: Pause,
}

impl Monitor {
    fn begin(socket: OwnedFd) -> io::Result<Monitor> {
        let wakes = settle(&socket, c"outlast-monitor")?;
        Ok(Monitor {
            socket,
            wakes,
            inbox: Vec::new(),
            fds: VecDeque::new(),
            outbox: wire::encode_monitor(std::process::id()),
            children: Vec::new(),
            has_spawned: false,
        })
    }

    fn keep(mut self) {
        loop {
            self.notice_ends();
            self.go_on_sweeping();
            self.send();
            if self.outbox.is_empty() && std::mem::take(&mut self.has_spawned) {
                give_back_code();
            }
            let next = self.children.iter().filter_map(|child| child.sweep.as_ref()).map(|sweep| sweep.next).min();
            self.wait(next);
            if self.receive().is_err() {
                break;
            }
        }
        self.end();
    }

    fn carry_out(&mut self, request: Request) -> io::Result<()> {
        match request {
            Request::Spawn { key, order } => {
                let mut fd = || self.fds.pop_front().ok_or(ErrorKind::InvalidData);
                let fds = [fd()?, fd()?, fd()?];
                self.spawn(key, &order, fds);
            }
            Request::Signal { key, signal } => {
                if let Some(child) = self.children.iter().find(|child| child.key == key) {
                    child.signal(signal);
                }
            }
            Request::Sweep { key } => {
                let now = Instant::now();
                if let Some(child) = self.children.iter_mut().find(|child| child.key == key) {
                    child.sweep = Some(Sweep { deadline: now + SWEEP_MAX, next: now, pause: Pause::default() });
                } else {
                    self.tell(&News::Swept { key });
                }
            }
        }
        Ok(())
    }

    fn spawn(&mut self, key: u64, order: &Order, fds: [OwnedFd; 3]) {
        self.has_spawned = true;
        let mut command = command(order, fds);
        match sandbox::confine(&mut command, order).and_then(|()| command.spawn()) {
            Ok(process) => {
                let pid = process.id();
                self.children.push(Child {
                    key,
                    pid: Pid::from_raw(pid as i32),
                    has_terminal: matches!(order.stdio, Stdio::Terminal(_)),
                    has_ended: false,
                    sweep: None,
                });
                self.tell(&News::Started { key, pid });
            }
            Err(error) => self.tell(&News::StartFailed { key, error: explain(order, &error) }),
        }
    }

    /// Reports children that have ended, and reaps the orphans that have come to us.
    fn notice_ends(&mut self) {
        for at in 0..self.children.len() {
            let child = &mut self.children[at];
            if child.has_ended {
                continue;
            }
            if let Some((_, exit)) = peek(libc::P_PID, child.pid) {
                child.has_ended = true;
                let key = child.key;
                self.tell(&News::Exited { key, exit });
            } else if child.has_terminal && has_stopped(child.pid) {
                let key = child.key;
                self.tell(&News::Stopped { key });
            }
        }
        // One may ask for any child that has ended, but a zombie we hold would be the answer each time.
        // So orphans wait until the last sweep is done.
        while self.children.iter().all(|child| !child.has_ended) {
            let Some((pid, exit)) = peek(libc::P_ALL, Pid::from_raw(0)) else { return };
            match self.children.iter_mut().find(|child| child.pid == pid) {
                Some(child) => {
                    child.has_ended = true;
                    let key = child.key;
                    self.tell(&News::Exited { key, exit });
                }
                None => reap(pid),
            }
        }
    }

    fn go_on_sweeping(&mut self) {
        let mut at = 0;
        while at < self.children.len() {
            if self.children[at].is_swept() {
                let child = self.children.swap_remove(at);
                reap(child.pid);
                self.tell(&News::Swept { key: child.key });
                // Orphans may have waited for this.
                self.notice_ends();
            } else {
                at += 1;
            }
        }
    }

    fn tell(&mut self, news: &News) {
        self.outbox.extend(wire::encode_news(news));
    }

    fn send(&mut self) {
        while !self.outbox.is_empty() {
            match write(&self.socket, &self.outbox) {
                Ok(count) => drop(self.outbox.drain(..count)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return,
                // Outlast is gone, which `receive` is about to learn.
                Err(_) => self.outbox.clear(),
            }
        }
    }

    /// An error means that outlast is gone.
    fn receive(&mut self) -> io::Result<()> {
        let mut space = [0; 16 * 1024];
        let mut control = cmsg_space!([RawFd; 16]);
        let count = {
            let mut slices = [IoSliceMut::new(&mut space)];
            let message = match recvmsg::<()>(self.socket.as_raw_fd(), &mut slices, Some(&mut control), RECEIVE_FLAGS) {
                Ok(message) => message,
                Err(Errno::EAGAIN | Errno::EINTR) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            for part in message.cmsgs()? {
                if let ControlMessageOwned::ScmRights(fds) = part {
                    // SAFETY: the kernel has just made these descriptors for us.
                    self.fds.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                }
            }
            message.bytes
        };
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        #[cfg(not(target_os = "linux"))]
        for fd in &self.fds {
            fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        }
        self.inbox.extend_from_slice(&space[..count]);
        while let Some(request) = wire::take_request(&mut self.inbox)? {
            self.carry_out(request)?;
        }
        Ok(())
    }

    /// Until there is something to do, or it is `next`.
    fn wait(&self, next: Option<Instant>) {
        let outgoing = if self.outbox.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
        let socket = PollFd::new(self.socket.as_fd(), PollFlags::POLLIN | outgoing);
        let wakes = PollFd::new(self.wakes.as_fd(), PollFlags::POLLIN);
        // EINTR is as good as a wake.
        let _ = poll(&mut [socket, wakes], timeout(next));
        drain(&self.wakes);
    }

    fn wait_for_ends(&self, next: Instant) {
        let _ = poll(&mut [PollFd::new(self.wakes.as_fd(), PollFlags::POLLIN)], timeout(Some(next)));
        drain(&self.wakes);
    }

    /// Outlast is gone, in whatever way: nothing it started may stay.
    fn end(mut self) {
        self.outbox.clear();
        self.fds.clear();
        for child in &self.children {
            child.signal_group(Number::SIGTERM);
        }
        let is_idle = self.children.is_empty() && peek_any().is_none();
        if !is_idle {
            self.end_politely();
            self.end_for_good();
        }
    }

    fn end_politely(&mut self) {
        let deadline = Instant::now() + GRACE;
        // Those in the children's groups hear it twice, which asks for no more than once does.
        descendants::signal(None, Number::SIGTERM);
        descendants::signal(None, Number::SIGCONT);
        while Instant::now() < deadline {
            for child in &mut self.children {
                child.has_ended = child.has_ended || peek(libc::P_PID, child.pid).is_some();
            }
            // When the last one ends, it or the one it came to us from is a child of ours, and wakes us.
            if self.children.iter().all(|child| child.has_ended) && descendants::count() == 0 {
                return;
            }
            self.wait_for_ends(deadline);
        }
    }

    fn end_for_good(&mut self) {
        let mut pause = Pause::default();
        loop {
            for child in &self.children {
                child.signal_group(Number::SIGKILL);
            }
            descendants::signal(None, Number::SIGKILL);
            loop {
                match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                    Ok(WaitStatus::StillAlive) => break,
                    Ok(status) => {
                        let gone = status.pid();
                        self.children.retain(|child| Some(child.pid) != gone);
                    }
                    Err(Errno::EINTR) => {}
                    // There is none left, and none below it, as it would have come to us.
                    Err(_) => return,
                }
            }
            self.wait_for_ends(Instant::now() + pause.next());
        }
    }
}

impl Child {
    fn signal(&self, signal: Signal) {
        let number = match signal {
            Signal::HangUp => Number::SIGHUP,
            Signal::Terminate => Number::SIGTERM,
            Signal::Kill => Number::SIGKILL,
            Signal::Continue => Number::SIGCONT,
        };
        // The group first, so that a child that waits for its own children is not told of their end before it is told.
        self.signal_group(number);
        descendants::signal(Some(self.pid), number);
    }

    /// We hold the leader unreaped, so the group is ours. Already gone is fine.
    fn signal_group(&self, number: Number) {
        let _ = killpg(self.pid, number);
        if matches!(number, Number::SIGTERM | Number::SIGHUP) {
            // A stopped process cannot hear it.
            let _ = killpg(self.pid, Number::SIGCONT);
        }
    }

    /// Takes the sweep one step further, if there is one and it is time. True when it is done: all below us is this
    /// child's.
    fn is_swept(&mut self) -> bool {
        let Some(sweep) = &mut self.sweep else { return false };
        // A process may fork while we look, so only a look that finds no process ends the sweep.
        let alive = descendants::signal(None, Number::SIGKILL);
        let _ = killpg(self.pid, Number::SIGKILL);
        let now = Instant::now();
        sweep.next = now + sweep.pause.next();
        self.has_ended && (alive == 0 || sweep.deadline <= now)
    }
}

/// Twice as long each time.
#[derive(Debug, Default)]
pub(super) struct Pause(Duration);

impl Pause {
    pub(super) fn next(&mut self) -> Duration {
        self.0 = (self.0 * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        self.0
    }
}

#[cfg(target_os = "linux")]
pub(super) const RECEIVE_FLAGS: MsgFlags = MsgFlags::MSG_CMSG_CLOEXEC;
#[cfg(not(target_os = "linux"))]
pub(super) const RECEIVE_FLAGS: MsgFlags = MsgFlags::empty();

pub(super) fn timeout(next: Option<Instant>) -> PollTimeout {
    let Some(next) = next else { return PollTimeout::NONE };
    // Rounded up: rounding down would make the last millisecond a busy one.
    let left = next.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
    PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
}

/// The child as ordered. It starts with default signals: std resets the mask and SIGPIPE, and a handler,
/// which is what we have for the others, does not survive an exec.
fn command(order: &Order, [stdin, stdout, stderr]: [OwnedFd; 3]) -> Command {
    let mut command = Command::new(&order.program);
    let has_terminal = matches!(order.stdio, Stdio::Terminal(_));
    if has_terminal || order.env_is_all {
        command.env_clear();
    }
    if !has_terminal {
        command.process_group(0);
    }
    command
        .args(&order.args)
        .current_dir(&order.cwd)
        .envs(order.env.iter().map(|(name, value)| (name, value)))
        .env(CHILD_TAG, &order.tag)
        .stdin(stdin)
        .stdout(stdout)
        .stderr(stderr);
    if has_terminal {
        // SAFETY: between fork and exec, this makes system calls only and touches no memory but its own.
        unsafe {
            command.pre_exec(|| {
                // A session has a group of the same number, so the child is reached as any other.
                setsid()?;
                if libc::ioctl(libc::STDIN_FILENO, libc::TIOCSCTTY as _, 0) != 0 {
                    return Err(io::Error::last_os_error());
                }
                #[cfg(target_os = "linux")]
                super::job::begin()?;
                Ok(())
            });
        }
    }
    #[cfg(target_os = "linux")]
    {
        let monitor = nix::unistd::getpid();
        // SAFETY: between fork and exec, this makes two system calls and touches no memory but its own.
        unsafe {
            command.pre_exec(move || {
                // Should the monitor itself be killed, its child at least goes with it. It has only one
                // thread, so the signal cannot come because a thread has ended.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if nix::unistd::getppid() == monitor { Ok(()) } else { Err(Errno::ESRCH.into()) }
            });
        }
    }
    command
}

/// Says what is missing: the kernel has one word for a missing program, directory and interpreter.
fn explain(order: &Order, error: &io::Error) -> io::Error {
    let program = order.program.to_string_lossy();
    let cwd = order.cwd.display();
    match fs::metadata(&order.cwd) {
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => return io::Error::new(ErrorKind::NotADirectory, format!("the working directory `{cwd}` is a file")),
        Err(problem) if problem.kind() == ErrorKind::NotFound => {
            return io::Error::new(ErrorKind::NotADirectory, format!("the working directory `{cwd}` does not exist"));
        }
        Err(problem) => {
            let words = format!("the working directory `{cwd}` cannot be entered: {}", words_of(&problem));
            return io::Error::new(problem.kind(), words);
        }
    }
    if let Some(error) = sandbox::explain(order, error) {
        return error;
    }
    let words = match (error.kind(), locate(order)) {
        (ErrorKind::NotFound, None) => format!("no program named `{program}`"),
        (ErrorKind::NotFound, Some(path)) => match interpreter(&path) {
            Some(name) => format!("`{}` is there, but its interpreter `{name}` is not", path.display()),
            None => format!("`{}` is there, but its interpreter is not", path.display()),
        },
        (ErrorKind::PermissionDenied, Some(path)) if path.is_dir() => format!("`{}` is a directory", path.display()),
        (ErrorKind::PermissionDenied, Some(path)) => format!("`{}` is there, but not executable", path.display()),
        _ => words_of(error),
    };
    io::Error::new(error.kind(), words)
}

/// The system's words without the number std adds to them.
fn words_of(error: &io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), |code| Errno::from_raw(code).desc().to_lowercase())
}

/// Where the program is, executable or not.
pub(super) fn locate(order: &Order) -> Option<PathBuf> {
    let program = Path::new(&order.program);
    if 1 < program.components().count() || program.is_absolute() {
        return Some(order.cwd.join(program)).filter(|path| path.exists());
    }
    let own = env::var_os("PATH");
    let ordered = order.env.iter().rev().find(|(name, _)| name == "PATH").map(|(_, value)| value.as_os_str());
    let path = ordered.or(own.as_deref()).unwrap_or(OsStr::new("/bin:/usr/bin"));
    env::split_paths(path).map(|folder| order.cwd.join(folder).join(program)).find(|path| path.exists())
}

/// What the first line of a script asks for.
fn interpreter(path: &Path) -> Option<String> {
    let mut start = [0; 256];
    let count = File::open(path).ok()?.read(&mut start).ok()?;
    let line = start[..count].strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    String::from_utf8_lossy(line).split_whitespace().next().map(str::to_owned)
}

/// Whether a child has ended, and how, without reaping it.
fn peek(which: libc::idtype_t, pid: Pid) -> Option<(Pid, Exit)> {
    loop {
        // SAFETY: a zeroed siginfo is a valid value of that plain C struct, the call only writes into it, and
        // what it wrote tells of a child, so that these fields have their meaning.
        let (result, code, pid, status) = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
            let result = libc::waitid(which, pid.as_raw() as libc::id_t, &raw mut info, options);
            (result, info.si_code, info.si_pid(), info.si_status())
        };
        if result < 0 && Errno::last() == Errno::EINTR {
            continue;
        }
        if result < 0 || pid == 0 {
            return None;
        }
        let exit = if code == libc::CLD_EXITED { Exit::Code(status) } else { Exit::Signal(status) };
        return Some((Pid::from_raw(pid), exit));
    }
}

/// Whether a child has stopped since this was last asked.
fn has_stopped(pid: Pid) -> bool {
    // SAFETY: a zeroed siginfo is a valid value of that plain C struct, and the call only writes into it.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let result =
            libc::waitid(libc::P_PID, pid.as_raw() as libc::id_t, &raw mut info, libc::WSTOPPED | libc::WNOHANG);
        result == 0 && info.si_pid() != 0
    }
}

/// Some child, ended or not; none if we have none.
fn peek_any() -> Option<()> {
    (waitpid(None, Some(WaitPidFlag::WNOHANG)) != Err(Errno::ECHILD)).then_some(())
}

/// Takes leave of a child that has ended.
fn reap(pid: Pid) {
    while waitpid(pid, Some(WaitPidFlag::WNOHANG)) == Err(Errno::EINTR) {}
}

/// The descriptor a SIGCHLD is written to.
static WAKE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn wake(_signal: libc::c_int) {
    let errno = Errno::last_raw();
    // SAFETY: write is one of the calls a handler may make; if the pipe is full, a wake is already due.
    unsafe { libc::write(WAKE.load(Ordering::Relaxed), c"".as_ptr().cast(), 1) };
    Errno::set_raw(errno);
}

extern "C" fn shrug(_signal: libc::c_int) {}

/// Hears of ended children, and no longer of requests to stop: we stop when outlast does. Those signals get
/// a handler rather than be ignored, because children would inherit that. What was ignored before we
/// came, as under `nohup`, stays so for them too.
fn watch_signals() -> io::Result<OwnedFd> {
    let (wakes, waker) = pipe()?;
    set_nonblocking(&wakes)?;
    set_nonblocking(&waker)?;
    // Open for the rest of our life, as the handler is.
    WAKE.store(waker.into_raw_fd(), Ordering::Relaxed);
    handle(libc::SIGCHLD, wake)?;
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2] {
        if !is_ignored(signal) {
            handle(signal, shrug)?;
        }
    }
    // SAFETY: clears this thread's mask, which the program that started us may have left blocking SIGCHLD.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
    Ok(wakes)
}

fn handle(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) -> io::Result<()> {
    // SAFETY: a zeroed sigaction with a handler set is a valid one, and our handlers make only calls that
    // a handler may make.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The first steps of a keeper or a monitor, up to the descriptor that is readable after a SIGCHLD.
pub(super) fn settle(socket: &OwnedFd, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    // Nothing of the client may be held open by us: not its pipes, its terminal, nor its directory.
    close_all_but(socket);
    fcntl(socket, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    dup2_stdin(&null)?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    env::set_current_dir("/")?;
    setsid()?;
    #[cfg(target_os = "linux")]
    // SAFETY: both calls only set a property of this process; the name ends with a zero.
    unsafe {
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
    }
    #[cfg(not(target_os = "linux"))]
    let _ = name;
    let wakes = watch_signals()?;
    set_nonblocking(socket)?;
    Ok(wakes)
}

pub(super) fn drain(wakes: &OwnedFd) {
    let mut space = [0; 64];
    while read(wakes, &mut space).is_ok_and(|count| count == space.len()) {}
}

/// Closes what we were forked with, but for the standard three and our socket.
fn close_all_but(socket: &OwnedFd) {
    let listed = fs::read_dir("/dev/fd").map(|entries| {
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect::<Vec<RawFd>>()
    });
    for fd in listed.unwrap_or_else(|_| (0..1024).collect()) {
        if libc::STDERR_FILENO < fd && fd != socket.as_raw_fd() {
            // SAFETY: its owner is in the program we were forked from; no code of this process returns to use
            // it. The directory we listed is closed already, which is a harmless error.
            unsafe { libc::close(fd) };
        }
    }
}
