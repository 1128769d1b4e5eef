//! The stand-in: the process that the shell waits for, so that the worker can leave the terminal and continue without
//! it.
//!
//! The stand-in only waits for the worker: it exits with the same code, stops when the worker stops, and passes
//! signals on. When the worker leaves the terminal, the stand-in exits, and the shell shows its prompt. If the worker
//! is killed, the stand-in restores the terminal.
#![expect(unsafe_code, reason = "forks, and handles signals")]

use std::{
    io::{self, ErrorKind, Read, Write},
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream as Stream,
    },
    sync::atomic::{AtomicI32, Ordering},
    task::{Context, Poll, ready},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{Signal as Number, kill},
        termios::{Termios, tcgetattr},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{ForkResult, Pid, fork, getpid, getppid, getsid, write},
};
use tokio::net::UnixStream;

use super::{
    handover::{Handover, Received},
    memory::give_back_code,
    outer,
    stderr::say,
};
use crate::Standing;

const LEFT: u8 = b'L';
const ALTERNATE: u8 = b'A';
const NOT_ALTERNATE: u8 = b'a';
const STOP: u8 = b'S';
const HANGUP: u8 = b'H';
const SUSPEND: u8 = b'Z';

/// The worker's connection to the stand-in.
#[derive(Debug)]
pub struct StandIn {
    line: Stream,
    /// The stand-in is a job of a shell, which can continue it.
    pub(super) is_job: bool,
}

/// What the stand-in passes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passed {
    Stop,
    Hangup,
    Suspend,
    /// The stand-in has exited, so the shell does not wait any more.
    Gone,
}

/// Forks, if this process is on a terminal. Must be called before any thread starts. `name` is used in the message
/// when the worker is killed.
pub fn stand_in(name: &'static str) -> io::Result<Option<Standing>> {
    if !outer::is_on_terminal() {
        return Ok(None);
    }
    let before = tcgetattr(outer::stdin())?;
    let ours = getsid(None);
    let is_job = getsid(Some(getppid())) == ours && ours != Ok(getpid());
    let (line, other) = Stream::pair()?;
    // SAFETY: there is no other thread yet, so every lock is free in the new process.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(other);
            Ok(Some(Standing::Worker(StandIn { line, is_job })))
        }
        ForkResult::Parent { child } => {
            drop(line);
            let code = Waiter { name, worker: child, line: other, before, is_alternate: false }.wait()?;
            Ok(Some(Standing::Over(code)))
        }
    }
}

impl StandIn {
    /// Registers with the current runtime.
    pub(super) fn attach(self) -> io::Result<Attached> {
        self.line.set_nonblocking(true)?;
        Ok(Attached(UnixStream::from_std(self.line)?))
    }
}

#[derive(Debug)]
pub(super) struct Attached(UnixStream);

impl Attached {
    pub(super) fn note_alternate(&self, is_alternate: bool) {
        self.say(if is_alternate { ALTERNATE } else { NOT_ALTERNATE });
    }

    /// Tells the stand-in that the worker continues without the terminal.
    pub(super) fn leave(&self) {
        self.say(LEFT);
    }

    /// Keeps the connection for the next program. The stand-in continues as a process of an older program, so these
    /// words never get another meaning.
    pub(super) fn keep(&self, handover: &mut Handover) -> i32 {
        handover.keep(self.0.as_fd())
    }

    /// The connection that the last program kept.
    pub(super) fn restore(received: &mut Received, number: i32) -> io::Result<Attached> {
        let line = Stream::from(received.take(number)?);
        line.set_nonblocking(true)?;
        Ok(Attached(UnixStream::from_std(line)?))
    }

    fn say(&self, word: u8) {
        // The stand-in always reads; its exit is noticed elsewhere. Written without the runtime, which refuses a
        // write before it has seen the socket writable once.
        let _ = write(&self.0, &[word]);
    }

    pub(super) fn poll_passed(&self, cx: &mut Context<'_>) -> Poll<Passed> {
        loop {
            let mut word = [0];
            match self.0.try_read(&mut word) {
                Ok(1) if word[0] == STOP => return Poll::Ready(Passed::Stop),
                Ok(1) if word[0] == HANGUP => return Poll::Ready(Passed::Hangup),
                Ok(1) if word[0] == SUSPEND => return Poll::Ready(Passed::Suspend),
                Ok(1) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if ready!(self.0.poll_read_ready(cx)).is_err() {
                        return Poll::Ready(Passed::Gone);
                    }
                }
                Ok(_) | Err(_) => return Poll::Ready(Passed::Gone),
            }
        }
    }
}

/// The state of the stand-in process.
struct Waiter {
    name: &'static str,
    worker: Pid,
    line: Stream,
    before: Termios,
    is_alternate: bool,
}

impl Waiter {
    fn wait(mut self) -> io::Result<u8> {
        let (mut wakes, waker) = Stream::pair()?;
        wakes.set_nonblocking(true)?;
        waker.set_nonblocking(true)?;
        self.line.set_nonblocking(true)?;
        WAKE.store(waker.as_raw_fd(), Ordering::Relaxed);
        for signal in [libc::SIGCHLD, libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGTSTP, libc::SIGCONT] {
            handle(signal)?;
        }
        give_back_code();
        loop {
            if let Some(code) = self.look_after()? {
                return Ok(code);
            }
            let line = PollFd::new(self.line.as_fd(), PollFlags::POLLIN);
            // EINTR counts as a wake-up.
            let _ = poll(&mut [PollFd::new(wakes.as_fd(), PollFlags::POLLIN), line], PollTimeout::NONE);
            if self.listen()? {
                return Ok(0);
            }
            let mut signals = [0; 64];
            while let Ok(count) = wakes.read(&mut signals) {
                if count == 0 {
                    break;
                }
                for &signal in &signals[..count] {
                    self.pass_on(signal.into());
                }
            }
        }
    }

    /// The exit code, if the worker has exited.
    fn look_after(&mut self) -> io::Result<Option<u8>> {
        loop {
            match waitpid(self.worker, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
                Ok(WaitStatus::Exited(_, code)) => return Ok(Some(u8::try_from(code).unwrap_or(1))),
                Ok(WaitStatus::Signaled(_, signal, _)) => {
                    // Reads the last messages of the worker.
                    self.listen()?;
                    outer::give_back_after(&self.before, self.is_alternate);
                    say(&format!("[outlast] {} was ended by {signal}", self.name));
                    return Ok(Some(128 + signal as u8));
                }
                // The worker has restored the terminal itself. Both processes are one job of the shell.
                Ok(WaitStatus::Stopped(..)) => _ = kill(getpid(), Number::SIGSTOP),
                Ok(_) => return Ok(None),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// True if the worker has left the terminal.
    fn listen(&mut self) -> io::Result<bool> {
        let mut words = [0; 64];
        loop {
            match self.line.read(&mut words) {
                // The worker exits; `look_after` reports it.
                Ok(0) => return Ok(false),
                Ok(count) => {
                    for word in &words[..count] {
                        match *word {
                            LEFT => return Ok(true),
                            ALTERNATE => self.is_alternate = true,
                            NOT_ALTERNATE => self.is_alternate = false,
                            _ => {}
                        }
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    fn pass_on(&mut self, signal: i32) {
        match signal {
            libc::SIGTERM | libc::SIGINT => _ = self.line.write(&[STOP]),
            libc::SIGHUP => _ = self.line.write(&[HANGUP]),
            libc::SIGTSTP => _ = self.line.write(&[SUSPEND]),
            // A stopped worker handles only this signal. A second SIGCONT does no harm.
            libc::SIGCONT => _ = kill(self.worker, Number::SIGCONT),
            _ => {}
        }
    }
}

/// The descriptor that the signal handler writes to.
static WAKE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn wake(signal: libc::c_int) {
    let errno = Errno::last_raw();
    let word = signal as u8;
    // SAFETY: write is async-signal-safe, and the byte outlives the call; if the socket is full, a wake-up is already
    // pending.
    unsafe { libc::write(WAKE.load(Ordering::Relaxed), (&raw const word).cast(), 1) };
    Errno::set_raw(errno);
}

fn handle(signal: libc::c_int) -> io::Result<()> {
    // SAFETY: a zeroed sigaction with a handler is valid, and the handler makes only async-signal-safe calls.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = wake as *const () as libc::sighandler_t;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
