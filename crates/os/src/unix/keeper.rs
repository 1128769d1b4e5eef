//! The keeper: a small process that forks a monitor for each child, and is the subreaper above all monitors. It knows
//! no children: each monitor has its own socket to outlast, and continues if the keeper exits.
//!
//! It has one thread, so that it can fork at any time, and runs in its own session. It learns from the end of file on
//! its socket that outlast is gone, and then kills the processes that the monitors have left.
#![expect(unsafe_code, reason = "forks, takes descriptors from a socket, `prctl`, `_exit`")]

use std::{
    io::{self, ErrorKind, IoSliceMut},
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd},
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use nix::{
    cmsg_space,
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
    sys::{
        signal::{Signal as Number, kill},
        socket::{ControlMessageOwned, recvmsg},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, fork, getpid, write},
};

use super::{
    descendants,
    memory::give_back_code,
    monitor::{self, GRACE, Pause, RECEIVE_FLAGS, SWEEP_MAX, drain, settle, timeout},
    wire,
};
use crate::News;

/// How long the monitors may take to end their children after outlast is gone. Then the keeper kills the rest.
const MONITORS_MAX: Duration = GRACE.saturating_add(SWEEP_MAX).saturating_add(Duration::from_millis(500));

/// The main function of the keeper.
pub(super) fn main(socket: OwnedFd) -> ! {
    // A panic must not unwind into the program that this process was forked from.
    let code = match catch_unwind(AssertUnwindSafe(|| Keeper::begin(socket).map(Keeper::keep))) {
        Ok(Ok(())) => 0,
        Ok(Err(_)) | Err(_) => 1,
    };
    // SAFETY: ends the process at once; the buffers of the program that it was forked from must not be flushed here.
    unsafe { libc::_exit(code) }
}

struct Keeper {
    socket: OwnedFd,
    /// Readable after a SIGCHLD.
    wakes: OwnedFd,
    /// Forked here and not reaped, so that their process ids are not reused.
    monitors: Vec<Pid>,
}

impl Keeper {
    fn begin(socket: OwnedFd) -> io::Result<Keeper> {
        let wakes = settle(&socket, c"outlast-keeper")?;
        #[cfg(target_os = "linux")]
        // SAFETY: the call only sets an attribute of this process. Outlast kills a keeper that was stopped; if outlast is
        // killed first, the kernel continues the keeper, which then ends what is left.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCONT);
        }
        Ok(Keeper { socket, wakes, monitors: Vec::new() })
    }

    fn keep(mut self) {
        loop {
            self.reap();
            let socket = PollFd::new(self.socket.as_fd(), PollFlags::POLLIN);
            // EINTR counts as a wake-up.
            let _ = poll(&mut [socket, PollFd::new(self.wakes.as_fd(), PollFlags::POLLIN)], timeout(None));
            drain(&self.wakes);
            match self.receive() {
                Ok(sockets) if sockets.is_empty() => {}
                Ok(sockets) => {
                    sockets.into_iter().for_each(|socket| self.start_monitor(socket));
                    give_back_code();
                }
                Err(_) => break,
            }
        }
        self.end();
    }

    /// The sockets of the monitors that outlast requests. An error means that outlast is gone.
    fn receive(&self) -> io::Result<Vec<OwnedFd>> {
        let mut space = [0; 16];
        let mut slices = [IoSliceMut::new(&mut space)];
        let mut control = cmsg_space!([RawFd; 16]);
        let message = match recvmsg::<()>(self.socket.as_raw_fd(), &mut slices, Some(&mut control), RECEIVE_FLAGS) {
            Ok(message) => message,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        let mut sockets = Vec::new();
        for part in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(fds) = part {
                // SAFETY: the kernel has just created these descriptors for this process.
                sockets.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        if message.bytes == 0 { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(sockets) }
    }

    fn start_monitor(&mut self, socket: OwnedFd) {
        // SAFETY: this is the only thread, so every lock is free in the new process, and it never returns from here.
        match unsafe { fork() } {
            Ok(ForkResult::Child) => monitor::main(socket),
            Ok(ForkResult::Parent { child }) => self.monitors.push(child),
            Err(error) => {
                let error = io::Error::new(io::Error::from(error).kind(), error.desc().to_lowercase());
                // The socket is new, so its buffer has room. Outlast knows the child by the socket.
                let _ = write(&socket, &wire::encode_news(&News::StartFailed { key: 0, error }));
            }
        }
    }

    /// Reaps exited monitors and orphans. Kills a monitor that was stopped, because it cannot work any more: outlast
    /// learns that from the end of its socket.
    ///
    /// True if there are more children.
    fn reap(&mut self) -> bool {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
                Ok(WaitStatus::Stopped(pid, _)) => {
                    if self.monitors.contains(&pid) {
                        let _ = kill(pid, Number::SIGKILL);
                    }
                }
                Ok(WaitStatus::StillAlive) => return true,
                Ok(status) => self.monitors.retain(|monitor| Some(*monitor) != status.pid()),
                Err(Errno::EINTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Outlast is gone. Each monitor notices that and ends its children; the keeper kills the rest.
    fn end(mut self) {
        let deadline = Instant::now() + MONITORS_MAX;
        let mut pause = Pause::default();
        loop {
            if !self.reap() {
                return;
            }
            if Instant::now() < deadline {
                descendants::kill_unmonitored(&[getpid()], &self.monitors);
            } else {
                descendants::signal(None, Number::SIGKILL);
                for monitor in &self.monitors {
                    let _ = kill(*monitor, Number::SIGKILL);
                }
            }
            let next = Instant::now() + pause.next();
            let _ = poll(&mut [PollFd::new(self.wakes.as_fd(), PollFlags::POLLIN)], timeout(Some(next)));
            drain(&self.wakes);
        }
    }
}
