//! A monitor: the parent of one child, and the subreaper of all its descendants, so that it finds them in any session
//! or group and with any environment. After outlast exits, it runs only until they have ended.
//!
//! It runs in its own session, so that neither a terminal nor a client's `killpg` reaches it, and has one thread, one
//! loop and no runtime. It learns from the end of file on its socket that outlast is gone, however outlast ended. If
//! the monitor itself is killed, the kernel kills its child, and outlast kills the other descendants
//! (`child_processes.rs`).
//!
//! At the end of a child's lease it kills all of them at once and asks no other process, so that this also happens while
//! outlast hangs or is stopped.
//!
//! An exited child stays a zombie until it is swept. So the kernel does not reuse its process id, which is also the
//! id of its group, while it may still be signalled.
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
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
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
    boot_time::Alarm,
    descendants,
    memory::give_back_code,
    sandbox,
    stops::is_ignored,
    stream::{pipe, set_nonblocking},
    wire::{self, Request},
};
use crate::{BootTime, CHILD_TAG, Exit, News, Order, Signal, Stdio};

/// How long the children may take to exit after outlast is gone.
pub(super) const GRACE: Duration = Duration::from_secs(1);

/// The bound of a sweep. It is done after this time even if a killed process remains, as may happen in the middle of
/// a disk access: that process runs no more code, and the monitor does not wait for it.
pub(super) const SWEEP_MAX: Duration = Duration::from_secs(1);

/// The delay between two scans for killed processes, unless a SIGCHLD comes first.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// The main function of a monitor.
pub(super) fn main(socket: OwnedFd) -> ! {
    // A panic must not unwind into the program that this process was forked from. The kernel kills the child with it
    // (see `command`).
    let code = match catch_unwind(AssertUnwindSafe(|| Monitor::begin(socket).map(Monitor::keep))) {
        Ok(Ok(())) => 0,
        Ok(Err(_)) | Err(_) => 1,
    };
    // SAFETY: ends the process at once; the buffers of the program that it was forked from must not be flushed here.
    unsafe { libc::_exit(code) }
}

struct Monitor {
    socket: OwnedFd,
    /// Readable after a SIGCHLD.
    wakes: OwnedFd,
    inbox: Vec<u8>,
    /// Descriptors received with the bytes of the inbox, in the order of its frames.
    fds: VecDeque<OwnedFd>,
    outbox: Vec<u8>,
    /// At most one: outlast requests one child from each monitor.
    children: Vec<Child>,
    /// A child was spawned, and the pages of that code can be released.
    has_spawned: bool,
}

/// A process that this monitor started and has not reaped.
struct Child {
    key: u64,
    pid: Pid,
    has_terminal: bool,
    has_ended: bool,
    sweep: Option<Sweep>,
    lease: Lease,
}

/// Until when a child may run.
enum Lease {
    /// As long as it likes.
    Unlimited,
    Until {
        end: BootTime,
        alarm: Alarm,
    },
    /// It and its descendants are being killed: the next scan is due then.
    Killing {
        next: Instant,
        pause: Pause,
    },
    /// None of them is left.
    Over,
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
            self.enforce_leases();
            self.notice_ends();
            self.go_on_sweeping();
            self.send();
            if self.outbox.is_empty() && std::mem::take(&mut self.has_spawned) {
                give_back_code();
            }
            self.wait(self.children.iter().filter_map(Child::next_scan).min());
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
            Request::Extend { key, until } => {
                if let Some(child) = self.children.iter_mut().find(|child| child.key == key) {
                    child.extend_lease(until)?;
                }
            }
        }
        Ok(())
    }

    /// Kills what is left of each child whose lease has ended, until a scan finds no process.
    fn enforce_leases(&mut self) {
        for at in 0..self.children.len() {
            let child = &mut self.children[at];
            let (key, has_ended) = (child.key, child.has_ended);
            // A child that has just exited by itself is reported as that.
            if child.lease_has_ended() && !has_ended && peek(libc::P_PID, child.pid).is_none() {
                self.tell(&News::LeaseEnded { key });
            }
            self.children[at].kill_without_lease();
        }
    }

    fn spawn(&mut self, key: u64, order: &Order, fds: [OwnedFd; 3]) {
        self.has_spawned = true;
        // The timer is made first: no child runs without it.
        let lease = match Lease::begin(order.live_until) {
            Ok(lease) => lease,
            Err(error) => return self.tell(&News::StartFailed { key, error }),
        };
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
                    lease,
                });
                self.tell(&News::Started { key, pid });
            }
            Err(error) => self.tell(&News::StartFailed { key, error: explain(order, &error) }),
        }
    }

    /// Reports exited children, and reaps orphans that were reparented to this process.
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
        // `waitid` can ask for any exited child, but it would return the unreaped child each time. So orphans are
        // reaped after the last sweep.
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
                // Outlast is gone; `receive` reports it.
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
                    // SAFETY: the kernel has just created these descriptors for this process.
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

    /// Waits for the socket, a SIGCHLD, the end of a lease or the time `next`.
    fn wait(&self, next: Option<Instant>) {
        let outgoing = if self.outbox.is_empty() { PollFlags::empty() } else { PollFlags::POLLOUT };
        self.wait_also_for(Some(PollFd::new(self.socket.as_fd(), PollFlags::POLLIN | outgoing)), next);
    }

    fn wait_for_ends(&self, next: Instant) {
        self.wait_also_for(None, Some(next));
    }

    fn wait_also_for(&self, socket: Option<PollFd<'_>>, next: Option<Instant>) {
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let alarms = self.children.iter().filter_map(|child| child.lease.alarm()).map(readable);
        let mut fds: Vec<PollFd<'_>> = socket.into_iter().chain([readable(self.wakes.as_fd())]).chain(alarms).collect();
        let looks = self.children.iter().filter_map(|child| child.lease.wait_max());
        let next = next.into_iter().chain(looks.map(|wait| Instant::now() + wait)).min();
        // EINTR counts as a wake-up.
        let _ = poll(&mut fds, timeout(next));
        drain(&self.wakes);
    }

    /// Outlast has exited or was killed: ends all processes that it started.
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
        // Members of the children's groups get the signal twice, which has the same effect as once.
        descendants::signal(None, Number::SIGTERM);
        descendants::signal(None, Number::SIGCONT);
        while Instant::now() < deadline {
            for child in &mut self.children {
                child.has_ended = child.has_ended || peek(libc::P_PID, child.pid).is_some();
            }
            // When the last descendant exits, it or an ancestor of it is a child of this process, so a SIGCHLD
            // arrives.
            let have_ended = self.children.iter().all(|child| child.has_ended) && descendants::count() == 0;
            if have_ended || self.children.iter().any(|child| child.lease.is_over()) {
                return;
            }
            self.wait_for_ends(deadline);
        }
    }

    fn end_for_good(&mut self) {
        let mut pause = Pause::default();
        // The alarm of a lease that has ended would end each wait at once.
        self.children.iter_mut().for_each(|child| child.lease = Lease::Over);
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
                    // No child is left, and no descendant: it would have been reparented to this process.
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
        // The group first, so that a child that waits for its own children gets the signal before it sees them exit.
        self.signal_group(number);
        descendants::signal(Some(self.pid), number);
    }

    /// The unreaped leader keeps the group id from being reused. No error if the group is gone.
    fn signal_group(&self, number: Number) {
        let _ = killpg(self.pid, number);
        if matches!(number, Number::SIGTERM | Number::SIGHUP) {
            // A stopped process handles the signal only after it is continued.
            let _ = killpg(self.pid, Number::SIGCONT);
        }
    }

    /// When the next scan for processes is due, of a sweep or after the end of the lease.
    fn next_scan(&self) -> Option<Instant> {
        let after_lease = match &self.lease {
            Lease::Killing { next, .. } => Some(*next),
            Lease::Unlimited | Lease::Until { .. } | Lease::Over => None,
        };
        self.sweep.as_ref().map(|sweep| sweep.next).into_iter().chain(after_lease).min()
    }

    /// An end that has come is final, even if the request to extend the lease was sent before.
    fn extend_lease(&mut self, until: BootTime) -> io::Result<()> {
        match &mut self.lease {
            Lease::Until { end, alarm } if *end < until && !end.is_past() => {
                alarm.set(until)?;
                *end = until;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// True once, when the end of the lease has come.
    fn lease_has_ended(&mut self) -> bool {
        let has_ended = matches!(self.lease, Lease::Until { end, .. } if end.is_past());
        if has_ended {
            self.lease = Lease::Killing { next: Instant::now(), pause: Pause::default() };
        }
        has_ended
    }

    /// Kills the child and all its descendants if its lease has ended. All descendants of this process belong to this
    /// child.
    fn kill_without_lease(&mut self) {
        let Lease::Killing { next, pause } = &mut self.lease else { return };
        let _ = killpg(self.pid, Number::SIGKILL);
        // A process may fork during the scan, so only a scan that finds no process is the last one.
        if descendants::signal(None, Number::SIGKILL) == 0 {
            self.lease = Lease::Over;
        } else {
            *next = Instant::now() + pause.next();
        }
    }

    /// Takes the next step of the sweep, if one is due. True when it is done. All descendants of this process belong
    /// to this child.
    fn is_swept(&mut self) -> bool {
        let Some(sweep) = &mut self.sweep else { return false };
        // A process may fork during the scan, so only a scan that finds no process ends the sweep.
        let alive = descendants::signal(None, Number::SIGKILL);
        let _ = killpg(self.pid, Number::SIGKILL);
        let now = Instant::now();
        sweep.next = now + sweep.pause.next();
        self.has_ended && (alive == 0 || sweep.deadline <= now)
    }
}

impl Lease {
    fn begin(until: Option<BootTime>) -> io::Result<Lease> {
        let Some(end) = until else { return Ok(Lease::Unlimited) };
        if end.is_past() {
            return Err(io::Error::other("its lease ended before it was started"));
        }
        let alarm = Alarm::at(end).map_err(|error| {
            io::Error::new(error.kind(), format!("there is no timer for its lease: {}", words_of(&error)))
        })?;
        Ok(Lease::Until { end, alarm })
    }

    /// Whether its end has come.
    fn is_over(&self) -> bool {
        match self {
            Lease::Unlimited => false,
            Lease::Until { end, .. } => end.is_past(),
            Lease::Killing { .. } | Lease::Over => true,
        }
    }

    fn alarm(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Lease::Until { alarm, .. } => alarm.descriptor(),
            Lease::Unlimited | Lease::Killing { .. } | Lease::Over => None,
        }
    }

    fn wait_max(&self) -> Option<Duration> {
        match self {
            Lease::Until { end, .. } => Alarm::wait_max(*end),
            Lease::Unlimited | Lease::Killing { .. } | Lease::Over => None,
        }
    }
}

/// A delay that doubles each time.
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
    // Rounded up: rounding down would make the last millisecond a busy loop.
    let left = next.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
    PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
}

/// The command of the order. The child starts with default signal actions: std resets the mask and SIGPIPE, and the
/// handlers that the monitor installs for the other signals do not survive an exec.
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
                // A session leader has a group of the same number, so the child is signalled like any other.
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
                // If the monitor is killed, the kernel kills its child. The monitor has only one thread, so the exit
                // of a thread cannot cause the signal.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if nix::unistd::getppid() == monitor { Ok(()) } else { Err(Errno::ESRCH.into()) }
            });
        }
    }
    command
}

/// Says what is missing: the kernel has one error for a missing program, directory and interpreter.
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
            Some(name) => format!("`{}` exists, but its interpreter `{name}` does not", path.display()),
            None => format!("`{}` exists, but its interpreter does not", path.display()),
        },
        (ErrorKind::PermissionDenied, Some(path)) if path.is_dir() => format!("`{}` is a directory", path.display()),
        (ErrorKind::PermissionDenied, Some(path)) => format!("`{}` exists, but is not executable", path.display()),
        _ => words_of(error),
    };
    io::Error::new(error.kind(), words)
}

/// The system's text without the number that std adds.
fn words_of(error: &io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), |code| Errno::from_raw(code).desc().to_lowercase())
}

/// The path of the program, executable or not.
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

/// The interpreter in the first line of a script.
fn interpreter(path: &Path) -> Option<String> {
    let mut start = [0; 256];
    let count = File::open(path).ok()?.read(&mut start).ok()?;
    let line = start[..count].strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    String::from_utf8_lossy(line).split_whitespace().next().map(str::to_owned)
}

/// Whether and how a child has exited, without reaping it.
fn peek(which: libc::idtype_t, pid: Pid) -> Option<(Pid, Exit)> {
    loop {
        // SAFETY: a zeroed siginfo is a valid value of that plain C struct, the call only writes into it, and it
        // fills in the fields of a child, so that these fields are valid.
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

/// Whether a child has stopped since the last call.
fn has_stopped(pid: Pid) -> bool {
    // SAFETY: a zeroed siginfo is a valid value of that plain C struct, and the call only writes into it.
    unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let result =
            libc::waitid(libc::P_PID, pid.as_raw() as libc::id_t, &raw mut info, libc::WSTOPPED | libc::WNOHANG);
        result == 0 && info.si_pid() != 0
    }
}

/// `Some` if this process has any child, running or not. May reap one.
fn peek_any() -> Option<()> {
    (waitpid(None, Some(WaitPidFlag::WNOHANG)) != Err(Errno::ECHILD)).then_some(())
}

/// Reaps an exited child.
fn reap(pid: Pid) {
    while waitpid(pid, Some(WaitPidFlag::WNOHANG)) == Err(Errno::EINTR) {}
}

/// The descriptor that the SIGCHLD handler writes to.
static WAKE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn wake(_signal: libc::c_int) {
    let errno = Errno::last_raw();
    // SAFETY: write is async-signal-safe; if the pipe is full, a wake-up is already pending.
    unsafe { libc::write(WAKE.load(Ordering::Relaxed), c"".as_ptr().cast(), 1) };
    Errno::set_raw(errno);
}

extern "C" fn shrug(_signal: libc::c_int) {}

/// Installs a handler for SIGCHLD, and empty handlers for signals that ask to stop: this process stops when outlast
/// does. Ignoring those signals is no alternative, because children would inherit that. A signal that was ignored at
/// the start, as under `nohup`, stays ignored for children too. SIGINT and SIGQUIT do not: a shell ignores them in a
/// background command because of the terminal's keys, and the child has a terminal or a process group of its own.
fn watch_signals() -> io::Result<OwnedFd> {
    let (wakes, waker) = pipe()?;
    set_nonblocking(&wakes)?;
    set_nonblocking(&waker)?;
    // Open until the process exits, as the handler is installed that long.
    WAKE.store(waker.into_raw_fd(), Ordering::Relaxed);
    handle(libc::SIGCHLD, wake)?;
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2] {
        if matches!(signal, libc::SIGINT | libc::SIGQUIT) || !is_ignored(signal) {
            handle(signal, shrug)?;
        }
    }
    // SAFETY: clears the signal mask of this thread, in which the parent program may have blocked SIGCHLD.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
    Ok(wakes)
}

fn handle(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) -> io::Result<()> {
    // SAFETY: a zeroed sigaction with a handler is valid, and the handlers make only async-signal-safe calls.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Prepares a keeper or monitor process. Returns the descriptor that is readable after a SIGCHLD.
pub(super) fn settle(socket: &OwnedFd, name: &std::ffi::CStr) -> io::Result<OwnedFd> {
    // This process must not keep open anything of the client: its pipes, its terminal or its directory.
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

/// Closes all inherited descriptors but the standard three and the socket.
fn close_all_but(socket: &OwnedFd) {
    let listed = fs::read_dir("/dev/fd").map(|entries| {
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect::<Vec<RawFd>>()
    });
    for fd in listed.unwrap_or_else(|_| (0..1024).collect()) {
        if libc::STDERR_FILENO < fd && fd != socket.as_raw_fd() {
            // SAFETY: the owner of the descriptor is in the program that this process was forked from; no code here
            // uses it. The listed directory is already closed, which is a harmless error.
            unsafe { libc::close(fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_extended_only_before_its_end() {
        let now = crate::boot_time();
        let ago = BootTime(now.saturating_sub(Duration::from_millis(1)));
        let [later, much_later] = [60, 120].map(|seconds| BootTime(now + Duration::from_secs(seconds)));
        let table = [
            // end, extended to, end then
            (later, much_later, Some(much_later)),
            (much_later, later, Some(much_later)),
            // The alarm has not been noticed yet.
            (ago, later, Some(ago)),
        ];
        for (end, to, expected) in table {
            let lease = Lease::Until { end, alarm: Alarm::at(end).unwrap() };
            let pid = Pid::from_raw(1);
            let mut child = Child { key: 1, pid, has_terminal: false, has_ended: false, sweep: None, lease };
            child.extend_lease(to).unwrap();
            let until = if let Lease::Until { end, .. } = child.lease { Some(end) } else { None };
            assert_eq!(until, expected);
        }
        assert!(Lease::begin(Some(ago)).is_err(), "no child is started");
        assert!(!Lease::begin(None).unwrap().is_over());
    }
}
