//! Words for people, on stderr.
#![expect(unsafe_code, reason = "borrows file descriptor 2, which std keeps open but does not lend without a lock")]

use std::{
    collections::VecDeque,
    os::fd::BorrowedFd,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    unistd::write,
};
use outlast_core::count::count;

/// What may wait for a slow reader of stderr. A line beyond it is dropped, and counted.
const WAITING_MAX: usize = 256 * 1024;

/// How long [`finish_saying`] waits for that reader.
const PATIENCE: Duration = Duration::from_millis(100);

/// What the kernel takes at once when it says a pipe is writable, even from a blocking writer.
const PIECE_MAX: usize = libc::PIPE_BUF;

/// The thread that waits in our stead does nothing else.
const WAITER_STACK: usize = 64 * 1024;

static WAITING: Mutex<Waiting> = Mutex::new(Waiting { bytes: VecDeque::new(), is_attended: false, dropped: 0 });
static ATTENDED: Condvar = Condvar::new();

/// Lines that stderr did not take at once.
struct Waiting {
    bytes: VecDeque<u8>,
    /// A thread writes them, and all that is said meanwhile comes after them.
    is_attended: bool,
    dropped: u64,
}

/// Says a line on stderr, without ever waiting for whoever reads it. What does not fit the pipe waits in memory; when
/// that is full too, the line is dropped, and the reader is told how many were once it is back.
///
/// Lines up to the system's `PIPE_BUF` are one write as long as nothing waits, so that they do not mix with others'.
pub fn say(line: &str) {
    let mut bytes = Vec::with_capacity(line.len() + 1);
    bytes.extend_from_slice(line.trim_end_matches('\n').as_bytes());
    bytes.push(b'\n');

    let mut waiting = waiting();
    if waiting.is_attended {
        if waiting.bytes.len() + bytes.len() > WAITING_MAX {
            waiting.dropped += 1;
        } else {
            waiting.bytes.extend(bytes);
        }
        return;
    }
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        match write_some(rest, PollTimeout::ZERO) {
            Ok(0) => break,
            Ok(count) => rest = &rest[count..],
            Err(_) => return,
        }
    }
    if !rest.is_empty() {
        // Without a thread the rest of the line is lost, and nothing else.
        let waiter = thread::Builder::new().name("outlast-stderr".into()).stack_size(WAITER_STACK);
        waiting.is_attended = waiter.spawn(attend).is_ok();
        if waiting.is_attended {
            waiting.bytes.extend(rest);
        }
    }
}

/// For the end of the program: gives a reader that is slow, but there, the time to take what waits.
pub fn finish_saying() {
    let deadline = Instant::now() + PATIENCE;
    let mut waiting = waiting();
    while waiting.is_attended {
        let patience = deadline.saturating_duration_since(Instant::now());
        if patience.is_zero() {
            return;
        }
        waiting = ATTENDED.wait_timeout(waiting, patience).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Writes what waits, for as long as it takes.
fn attend() {
    let mut piece = Vec::with_capacity(PIECE_MAX);
    loop {
        {
            let mut waiting = waiting();
            if waiting.bytes.is_empty() && waiting.dropped > 0 {
                let lines = count(waiting.dropped, "line was", "lines were");
                let words = format!("[outlast] {lines} dropped here, as nobody read them\n");
                waiting.dropped = 0;
                waiting.bytes.extend(words.as_bytes());
            }
            if waiting.bytes.is_empty() {
                break finish(waiting);
            }
            piece.clear();
            piece.extend(waiting.bytes.iter().take(PIECE_MAX));
        }
        let written = write_some(&piece, PollTimeout::NONE);
        let mut waiting = waiting();
        match written {
            Ok(count) => drop(waiting.bytes.drain(..count)),
            // Nobody will ever read it.
            Err(_) => break finish(waiting),
        }
    }
}

fn finish(mut waiting: MutexGuard<'_, Waiting>) {
    *waiting = Waiting { bytes: VecDeque::new(), is_attended: false, dropped: 0 };
    ATTENDED.notify_all();
}

fn waiting() -> MutexGuard<'static, Waiting> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How much stderr took, once it took something; nothing if that took longer than allowed.
fn write_some(bytes: &[u8], timeout: PollTimeout) -> Result<usize, Errno> {
    // SAFETY: std opens /dev/null in place of a closed descriptor 2 at start, and we never close it. Were
    // it closed all the same, the calls below would say so and do no harm.
    let stderr = unsafe { BorrowedFd::borrow_raw(libc::STDERR_FILENO) };
    loop {
        match poll(&mut [PollFd::new(stderr, PollFlags::POLLOUT)], timeout) {
            Ok(0) => return Ok(0),
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error),
        }
        match write(stderr, &bytes[..bytes.len().min(PIECE_MAX)]) {
            Err(Errno::EINTR) => {}
            // Writable a moment ago, and full again.
            Err(Errno::EAGAIN) if timeout == PollTimeout::ZERO => return Ok(0),
            Err(Errno::EAGAIN) => {}
            written => return written,
        }
    }
}
