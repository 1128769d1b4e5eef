//! One who stands in our place before the shell, so that we can leave a terminal and go on without it.
//!
//! A shell waits for the process it started. That one only waits too: it mirrors how we end, stops when we stop, and
//! passes on what it is told. When we leave the terminal it ends, and the shell has its prompt back. As it outlives us, it
//! also gives the terminal back if we are killed.
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

use super::{memory::give_back_code, outer, words::say};
use crate::os::Standing;

const LEFT: u8 = b'L';
const ALTERNATE: u8 = b'A';
const NOT_ALTERNATE: u8 = b'a';
const STOP: u8 = b'S';
const HANGUP: u8 = b'H';
const SUSPEND: u8 = b'Z';

/// The one before the shell, as we know it.
#[derive(Debug)]
pub struct StandIn {
    line: Stream,
    /// A shell has it as one of its jobs, and would call it back.
    pub(super) is_job: bool,
}

/// What it passes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passed {
    Stop,
    Hangup,
    Suspend,
    /// It is gone, and with it the shell's patience.
    Gone,
}

/// Forks, if we are on a terminal. Must come before any thread. `name` is what is said to have ended when we are killed.
pub fn stand_in(name: &'static str) -> io::Result<Option<Standing>> {
    if !outer::is_on_terminal() {
        return Ok(None);
    }
    let before = tcgetattr(outer::stdin())?;
    let ours = getsid(None);
    let is_job = getsid(Some(getppid())) == ours && ours != Ok(getpid());
    let (line, other) = Stream::pair()?;
    // SAFETY: there is no other thread yet, so the new process finds every lock free.
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
    /// Joins the runtime we are in.
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

    /// We go on without the terminal.
    pub(super) fn leave(&self) {
        self.say(LEFT);
    }

    fn say(&self, word: u8) {
        // It only ever listens; if it is gone, that is told elsewhere. Past the runtime, which refuses to try before it
        // has once seen that there is room.
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

/// The one who waits.
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
            // EINTR is as good as a wake.
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

    /// The exit code, when the worker has one.
    fn look_after(&mut self) -> io::Result<Option<u8>> {
        loop {
            match waitpid(self.worker, Some(WaitPidFlag::WNOHANG | WaitPidFlag::WUNTRACED)) {
                Ok(WaitStatus::Exited(_, code)) => return Ok(Some(u8::try_from(code).unwrap_or(1))),
                Ok(WaitStatus::Signaled(_, signal, _)) => {
                    // What it last said may not have been heard.
                    self.listen()?;
                    outer::give_back_after(&self.before, self.is_alternate);
                    say(&format!("[outlast] {} was ended by {signal}", self.name));
                    return Ok(Some(128 + signal as u8));
                }
                // It has given the terminal back itself. Both of us are one job to the shell.
                Ok(WaitStatus::Stopped(..)) => _ = kill(getpid(), Number::SIGSTOP),
                Ok(_) => return Ok(None),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// True if the worker has left.
    fn listen(&mut self) -> io::Result<bool> {
        let mut words = [0; 64];
        loop {
            match self.line.read(&mut words) {
                // Its end is about to show.
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
            // Stopped, it hears nothing but this. To be told twice to go on is no harm.
            libc::SIGCONT => _ = kill(self.worker, Number::SIGCONT),
            _ => {}
        }
    }
}

/// Where a signal is written to.
static WAKE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn wake(signal: libc::c_int) {
    let errno = Errno::last_raw();
    let word = signal as u8;
    // SAFETY: write is one of the calls a handler may make, and the byte is there; if the line is full, a wake is due.
    unsafe { libc::write(WAKE.load(Ordering::Relaxed), (&raw const word).cast(), 1) };
    Errno::set_raw(errno);
}

fn handle(signal: libc::c_int) -> io::Result<()> {
    // SAFETY: a zeroed sigaction with a handler set is a valid one, and the handler makes only calls that it may make.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = wake as *const () as libc::sighandler_t;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
