//! The terminal of the user: made raw for an agent, and restored in every case. The terminal of the agent is in
//! `pty.rs`.
#![expect(
    unsafe_code,
    reason = "the size is asked by an ioctl that nix does not wrap; descriptors 0 and 1 are borrowed"
)]

use std::{
    fs::OpenOptions,
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
        unix::fs::OpenOptionsExt,
    },
    panic,
    path::PathBuf,
    sync::{
        Mutex, Once,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use nix::{
    sys::{
        signal::{Signal as Number, kill},
        termios::{
            ControlFlags, InputFlags, LocalFlags, OutputFlags, SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr,
        },
    },
    unistd::{dup2_stderr, dup2_stdin, dup2_stdout, getpgrp, getpid, isatty, setsid, tcgetpgrp, write},
};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{
    handover::{Handover, Received},
    stand_in::{Attached, Passed, StandIn},
    stream::{self, Sink, Source, terminal_stream},
};
use crate::{
    OuterEvent, Size,
    calm::{PASTE_OFF, calm},
};

/// The settings of the terminal before outlast changed them.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);
/// The terminal is in raw mode now.
static IS_RAW: AtomicBool = AtomicBool::new(false);
static IS_ALTERNATE: AtomicBool = AtomicBool::new(false);
static HOOK: Once = Once::new();

/// The user's terminal in raw mode. Dropping it restores the terminal.
#[derive(Debug)]
pub struct Outer {
    pub source: Source,
    pub sink: Sink,
    signals: Vec<(Signal, OuterEvent)>,
    stand_in: Attached,
    is_job: bool,
    is_abandoned: bool,
}

/// The user's terminal as saved state. Its descriptors are kept by a [`Handover`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedOuter {
    source: i32,
    sink: i32,
    stand_in: i32,
    is_job: bool,
    is_abandoned: bool,
    is_raw: bool,
    is_alternate: bool,
    before: Option<SavedSettings>,
}

/// The settings that outlast changes, as the kernel numbers them on this system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SavedSettings {
    input: libc::tcflag_t,
    output: libc::tcflag_t,
    control: libc::tcflag_t,
    local: libc::tcflag_t,
    characters: Vec<u8>,
}

impl SavedSettings {
    fn of(settings: &Termios) -> SavedSettings {
        SavedSettings {
            input: settings.input_flags.bits(),
            output: settings.output_flags.bits(),
            control: settings.control_flags.bits(),
            local: settings.local_flags.bits(),
            characters: settings.control_chars.to_vec(),
        }
    }

    /// With the present settings of the terminal, as far as outlast does not change them.
    fn settings(&self, mut now: Termios) -> Termios {
        now.input_flags = InputFlags::from_bits_retain(self.input);
        now.output_flags = OutputFlags::from_bits_retain(self.output);
        now.control_flags = ControlFlags::from_bits_retain(self.control);
        now.local_flags = LocalFlags::from_bits_retain(self.local);
        for (character, saved) in now.control_chars.iter_mut().zip(&self.characters) {
            *character = *saved;
        }
        now
    }
}

impl Outer {
    /// What the next program needs; the terminal stays in raw mode. `None` if a thread reads the terminal, whose input
    /// would be lost.
    pub fn save(&self, handover: &mut Handover) -> Option<SavedOuter> {
        Some(SavedOuter {
            source: self.source.keep(handover)?,
            sink: self.sink.keep(handover)?,
            stand_in: self.stand_in.keep(handover),
            is_job: self.is_job,
            is_abandoned: self.is_abandoned,
            is_raw: IS_RAW.load(Ordering::Relaxed),
            is_alternate: IS_ALTERNATE.load(Ordering::Relaxed),
            before: settings().as_ref().map(SavedSettings::of),
        })
    }

    /// Whether [`Outer::save`] is possible.
    pub fn can_be_saved(&self) -> bool {
        !self.source.is_threaded() && !self.sink.is_threaded()
    }

    /// The terminal that the last program kept.
    pub fn restore(saved: SavedOuter, received: &mut Received) -> io::Result<Outer> {
        // A terminal that has closed has no settings, and reports its end by itself.
        let before = saved.before.zip(tcgetattr(stdin()).ok()).map(|(before, now)| before.settings(now));
        *BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = before;
        IS_RAW.store(saved.is_raw, Ordering::Relaxed);
        IS_ALTERNATE.store(saved.is_alternate, Ordering::Relaxed);
        give_back_at_panic();
        Ok(Outer {
            source: Source::restore(received, saved.source)?,
            sink: Sink::restore(received, saved.sink)?,
            signals: signals()?,
            stand_in: Attached::restore(received, saved.stand_in)?,
            is_job: saved.is_job,
            is_abandoned: saved.is_abandoned,
        })
    }

    /// A stand-in exists only if stdin and stdout are both a terminal.
    pub fn begin(stand_in: StandIn) -> io::Result<Outer> {
        let is_job = stand_in.is_job;
        let stand_in = stand_in.attach()?;
        let (source, sink) = match (reopen(libc::STDIN_FILENO), reopen(libc::STDOUT_FILENO)) {
            // A new open file description, so that O_NONBLOCK does not affect other processes.
            (Ok(read), Ok(write)) => terminal_stream(read, write)?,
            _ => (stream::stdin()?, stream::stdout()?),
        };
        let signals = signals()?;
        let before = tcgetattr(stdin())?;
        *BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(before);
        give_back_at_panic();
        let outer = Outer { source, sink, signals, stand_in, is_job, is_abandoned: false };
        outer.make_raw()?;
        Ok(outer)
    }

    /// Passes every byte on unchanged and without echo. Does nothing while outlast is in the background.
    pub fn make_raw(&self) -> io::Result<()> {
        if !is_ours() {
            return Ok(());
        }
        let before = BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        let Some(mut settings) = before else { return Ok(()) };
        cfmakeraw(&mut settings);
        tcsetattr(stdin(), SetArg::TCSANOW, &settings)?;
        IS_RAW.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Restores the terminal and stops this process, as a shell expects after Ctrl-Z. Returns when the process is
    /// continued.
    pub fn suspend(&self) {
        give_back();
        let _ = kill(getpid(), Number::SIGSTOP);
    }

    /// Whether this process is a job of a shell, which would continue it after a stop.
    pub fn is_job(&self) -> bool {
        self.is_job
    }

    /// Restores the terminal and lets the shell show its prompt. The process continues without the terminal, in its
    /// own session. `words` is the last output to the terminal.
    pub fn leave(self, words: &str) -> io::Result<()> {
        give_back();
        write_stdout(words);
        let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
        dup2_stdin(&null)?;
        dup2_stdout(&null)?;
        dup2_stderr(&null)?;
        // Fails if this process already leads a session, as after the terminal closed.
        let _ = setsid();
        self.stand_in.leave();
        Ok(())
    }

    /// The next event of the terminal. Cancel-safe.
    pub fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<OuterEvent> {
        for (signal, event) in &mut self.signals {
            if signal.poll_recv(cx).is_ready() {
                return Poll::Ready(*event);
            }
        }
        if self.is_abandoned {
            return Poll::Pending;
        }
        self.stand_in.poll_passed(cx).map(|passed| match passed {
            Passed::Stop => OuterEvent::StopPassed,
            Passed::Hangup => OuterEvent::HangupPassed,
            Passed::Suspend => OuterEvent::SuspendPassed,
            Passed::Gone => {
                self.is_abandoned = true;
                take_back();
                OuterEvent::Abandoned
            }
        })
    }

    /// The current size; a default if the terminal does not report one.
    pub fn size(&self) -> Size {
        outer_size()
    }

    /// Whether the output has switched to the alternate screen, which must be left at the end.
    pub fn note_alternate(&self, is_alternate: bool) {
        if IS_ALTERNATE.swap(is_alternate, Ordering::Relaxed) != is_alternate {
            self.stand_in.note_alternate(is_alternate);
        }
    }
}

impl Drop for Outer {
    fn drop(&mut self) {
        give_back();
        *BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = None;
    }
}

fn signals() -> io::Result<Vec<(Signal, OuterEvent)>> {
    let all = [
        (libc::SIGWINCH, OuterEvent::Resized),
        (libc::SIGTSTP, OuterEvent::SuspendAsked),
        (libc::SIGCONT, OuterEvent::Continued),
    ];
    all.into_iter().map(|(number, event)| Ok((signal(SignalKind::from_raw(number))?, event))).collect()
}

fn give_back_at_panic() {
    HOOK.call_once(|| {
        let next = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            give_back();
            next(panic);
        }));
    });
}

/// The settings of the terminal before outlast changed them.
pub(super) fn settings() -> Option<Termios> {
    BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
}

/// Restores the terminal after the stand-in has exited. The process is not in the foreground group any more, but the
/// terminal still has its settings, and no other process restores them.
fn take_back() {
    let before = BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    if IS_RAW.swap(false, Ordering::Relaxed)
        && let Some(before) = before
    {
        give_back_after(&before, IS_ALTERNATE.swap(false, Ordering::Relaxed));
    }
}

/// Restores the terminal for a process that cannot do it itself. If another program has changed the settings since,
/// they stay, and only the modes that no shell resets are reset.
pub(super) fn give_back_after(before: &Termios, is_alternate: bool) {
    // SAFETY: the call only ignores the signal that would stop this process when it writes from the background.
    unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
    let mut raw = before.clone();
    cfmakeraw(&mut raw);
    let is_ours = tcgetattr(stdin()).is_ok_and(|now| now.local_flags == raw.local_flags);
    let calm = calm(is_alternate);
    let calm = if is_ours { &calm } else { calm.strip_prefix(PASTE_OFF).unwrap_or(&calm) };
    // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and outlast never closes them.
    let stdout = unsafe { BorrowedFd::borrow_raw(libc::STDOUT_FILENO) };
    // A terminal that has closed needs no reset.
    let _ = write(stdout, calm);
    if is_ours {
        let _ = tcsetattr(stdin(), SetArg::TCSANOW, before);
    }
}

/// The current size of the user's terminal; a default if the terminal does not report one.
pub fn outer_size() -> Size {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the request writes one `winsize`, which outlives the call; a failure leaves the zeros.
    unsafe { libc::ioctl(libc::STDIN_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    if size.ws_col == 0 || size.ws_row == 0 {
        return Size::default();
    }
    Size { columns: size.ws_col, rows: size.ws_row, width: size.ws_xpixel, height: size.ws_ypixel }
}

/// Writes a short text to stdout at once. An error is ignored: the terminal has closed.
pub fn write_stdout(words: &str) {
    // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and outlast never closes them.
    let stdout = unsafe { BorrowedFd::borrow_raw(libc::STDOUT_FILENO) };
    let _ = write(stdout, words.as_bytes());
}

pub(super) fn is_on_terminal() -> bool {
    [libc::STDIN_FILENO, libc::STDOUT_FILENO].iter().all(|number| is_terminal(*number))
}

/// Restores the terminal. Quick, and safe to call twice.
fn give_back() {
    if !IS_RAW.swap(false, Ordering::Relaxed) || !is_ours() {
        return;
    }
    // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and outlast never closes them.
    let stdout = unsafe { BorrowedFd::borrow_raw(libc::STDOUT_FILENO) };
    // A terminal that has closed needs no reset.
    let _ = write(stdout, &calm(IS_ALTERNATE.swap(false, Ordering::Relaxed)));
    // A panicking thread may hold the lock.
    if let Ok(before) = BEFORE.try_lock()
        && let Some(before) = before.as_ref()
    {
        let _ = tcsetattr(stdin(), SetArg::TCSANOW, before);
    }
}

/// True if this process is in the foreground: the kernel stops a background process that changes a terminal.
fn is_ours() -> bool {
    tcgetpgrp(stdin()).is_ok_and(|group| group == getpgrp())
}

pub(super) fn stdin() -> BorrowedFd<'static> {
    // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and outlast never closes them.
    unsafe { BorrowedFd::borrow_raw(libc::STDIN_FILENO) }
}

fn is_terminal(number: RawFd) -> bool {
    // SAFETY: as in `stdin`.
    isatty(unsafe { BorrowedFd::borrow_raw(number) }).unwrap_or(false)
}

fn reopen(number: RawFd) -> io::Result<OwnedFd> {
    #[cfg(target_os = "linux")]
    let path = PathBuf::from(format!("/proc/self/fd/{number}"));
    #[cfg(not(target_os = "linux"))]
    // SAFETY: as in `stdin`.
    let path: PathBuf = nix::unistd::ttyname(unsafe { BorrowedFd::borrow_raw(number) })?;
    let file = OpenOptions::new()
        .read(number == libc::STDIN_FILENO)
        .write(number != libc::STDIN_FILENO)
        .custom_flags(libc::O_NOCTTY | libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)?;
    // If the file is no terminal any more, epoll could refuse it.
    if !isatty(file.as_fd())? {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(file.into())
}
