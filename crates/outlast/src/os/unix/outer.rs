//! The terminal a person sits at: lent to an agent, and given back as it was, whatever happens.
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
        termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr},
    },
    unistd::{dup2_stderr, dup2_stdin, dup2_stdout, getpgrp, getpid, isatty, setsid, tcgetpgrp, write},
};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{
    stand_in::{Attached, Passed, StandIn},
    stream::{self, Sink, Source, terminal_stream},
};
use crate::os::{
    OuterEvent, Size,
    calm::{PASTE_OFF, calm},
};

/// How the terminal was when we came, for as long as we have it.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);
/// It is raw at this moment.
static IS_RAW: AtomicBool = AtomicBool::new(false);
static IS_ALTERNATE: AtomicBool = AtomicBool::new(false);
static HOOK: Once = Once::new();

/// Our own terminal, raw. Dropping it gives it back.
#[derive(Debug)]
pub struct Outer {
    pub source: Source,
    pub sink: Sink,
    signals: Vec<(Signal, OuterEvent)>,
    stand_in: Attached,
    is_job: bool,
    is_abandoned: bool,
}

impl Outer {
    /// There is a stand-in only where stdin and stdout are both a terminal.
    pub fn begin(stand_in: StandIn) -> io::Result<Outer> {
        let is_job = stand_in.is_job;
        let stand_in = stand_in.attach()?;
        let (source, sink) = match (reopen(libc::STDIN_FILENO), reopen(libc::STDOUT_FILENO)) {
            // A description of our own: not to block is then nobody else's business.
            (Ok(read), Ok(write)) => terminal_stream(read, write)?,
            _ => (stream::stdin()?, stream::stdout()?),
        };
        let all = [
            (libc::SIGWINCH, OuterEvent::Resized),
            (libc::SIGTSTP, OuterEvent::SuspendAsked),
            (libc::SIGCONT, OuterEvent::Continued),
        ];
        let signals = all
            .into_iter()
            .map(|(number, event)| Ok((signal(SignalKind::from_raw(number))?, event)))
            .collect::<io::Result<Vec<_>>>()?;
        let before = tcgetattr(stdin())?;
        *BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(before);
        HOOK.call_once(|| {
            let next = panic::take_hook();
            panic::set_hook(Box::new(move |panic| {
                give_back();
                next(panic);
            }));
        });
        let outer = Outer { source, sink, signals, stand_in, is_job, is_abandoned: false };
        outer.make_raw()?;
        Ok(outer)
    }

    /// Every byte to us, none changed, none echoed. Not while the terminal is somebody else's.
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

    /// Gives the terminal back and stops us, as a shell expects of Ctrl-Z. Returns when we are continued.
    pub fn suspend(&self) {
        give_back();
        let _ = kill(getpid(), Number::SIGSTOP);
    }

    /// Whether somebody would continue us if we stopped: a shell that has us as one of its jobs.
    pub fn is_job(&self) -> bool {
        self.is_job
    }

    /// Gives the terminal back, and the shell its prompt. We go on without either, in a session of our own.
    /// The words are the last that is written there.
    pub fn leave(self, words: &str) -> io::Result<()> {
        give_back();
        write_stdout(words);
        let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
        dup2_stdin(&null)?;
        dup2_stdout(&null)?;
        dup2_stderr(&null)?;
        // Already so if the terminal is gone and took the session with it.
        let _ = setsid();
        self.stand_in.leave();
        Ok(())
    }

    /// What happened to the terminal. Cancel-safe.
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

    /// As it is now; something usual if it does not know.
    pub fn size(&self) -> Size {
        outer_size()
    }

    /// Whether whatever writes to it has gone to the alternate screen, which must be left in the end.
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

/// How our terminal was before we took it.
pub(super) fn settings() -> Option<Termios> {
    BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
}

/// We have no place before the shell any more, so that the terminal is not ours by its rules; but it is as we made it,
/// and nobody else will mend it.
fn take_back() {
    let before = BEFORE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    if IS_RAW.swap(false, Ordering::Relaxed)
        && let Some(before) = before
    {
        give_back_after(&before, IS_ALTERNATE.swap(false, Ordering::Relaxed));
    }
}

/// As it was, after one who cannot do it any more. If somebody has changed it since, it is theirs, and only what no shell
/// mends is mended.
pub(super) fn give_back_after(before: &Termios, is_alternate: bool) {
    // SAFETY: only says that to write from the background is not to stop us.
    unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
    let mut raw = before.clone();
    cfmakeraw(&mut raw);
    let is_ours = tcgetattr(stdin()).is_ok_and(|now| now.local_flags == raw.local_flags);
    let calm = calm(is_alternate);
    let calm = if is_ours { &calm } else { calm.strip_prefix(PASTE_OFF).unwrap_or(&calm) };
    // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and we never close them.
    let stdout = unsafe { BorrowedFd::borrow_raw(libc::STDOUT_FILENO) };
    // Whoever hung up does not need it.
    let _ = write(stdout, calm);
    if is_ours {
        let _ = tcsetattr(stdin(), SetArg::TCSANOW, before);
    }
}

/// Of the terminal we are on, as it is now; something usual if it does not know.
pub fn outer_size() -> Size {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the request writes one `winsize`, which is there and ours; a failure leaves the zeros.
    unsafe { libc::ioctl(libc::STDIN_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    if size.ws_col == 0 || size.ws_row == 0 {
        return Size::default();
    }
    Size { columns: size.ws_col, rows: size.ws_row, width: size.ws_xpixel, height: size.ws_ypixel }
}

/// A few words to our stdout, at once. Whoever hung up does not need them.
pub fn write_stdout(words: &str) {
    // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and we never close them.
    let stdout = unsafe { BorrowedFd::borrow_raw(libc::STDOUT_FILENO) };
    let _ = write(stdout, words.as_bytes());
}

pub(super) fn is_on_terminal() -> bool {
    [libc::STDIN_FILENO, libc::STDOUT_FILENO].iter().all(|number| is_terminal(*number))
}

/// As it was. Quick, and safe to do twice.
fn give_back() {
    if !IS_RAW.swap(false, Ordering::Relaxed) || !is_ours() {
        return;
    }
    // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and we never close them.
    let stdout = unsafe { BorrowedFd::borrow_raw(libc::STDOUT_FILENO) };
    // Whoever hung up does not need it.
    let _ = write(stdout, &calm(IS_ALTERNATE.swap(false, Ordering::Relaxed)));
    // Somebody who panics may hold the lock.
    if let Ok(before) = BEFORE.try_lock()
        && let Some(before) = before.as_ref()
    {
        let _ = tcsetattr(stdin(), SetArg::TCSANOW, before);
    }
}

/// We are in the foreground: to touch a terminal from the background stops whoever does it.
fn is_ours() -> bool {
    tcgetpgrp(stdin()).is_ok_and(|group| group == getpgrp())
}

pub(super) fn stdin() -> BorrowedFd<'static> {
    // SAFETY: std opens /dev/null in place of closed standard descriptors at start, and we never close them.
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
    // Were it something else by now, epoll could refuse it.
    if !isatty(file.as_fd())? {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    Ok(file.into())
}
